"""Symbolic sizes and numbers, which TorchDynamo leaves open in captures, and conditions on them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

_READ = re.compile(r"(u|zuf)\d+")
"""Pattern of the names that torch gives to symbols for numbers that are read from tensors."""

OF_VALUES = {
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
}
"""The names of the errors that fake tensors raise if a result depends on values."""

__all__ = ["GuardOnDataDependentSymNode", "ShapeEnv"]


def is_symbolic(value: Any) -> bool:
    """Whether a value is a size or number that TorchDynamo has left open."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbols_in(value: Any) -> list[Any]:
    """Return the sympy symbols of a symbolic number, sorted by name."""
    return sorted(value.node.expr.free_symbols, key=str)


def captured_value(value: Any) -> Any:
    """Return the value that a symbolic number had in the capture; a plain number as it is.

    ``None``: the number depends on values of tensors, which a capture does not know.
    """
    if not is_symbolic(value):
        return value
    return value.node.hint if value.node.has_hint() else None


def value_with(value: Any, sizes: Mapping[Any, int]) -> Any:
    """Compute a symbolic number from values of its symbols; return a plain number as it is.

    Args:
        value: the number.
        sizes: the values, by sympy symbol.

    Returns:
        The plain number; ``None``: it has symbols that are not in ``sizes``.
    """
    if not is_symbolic(value):
        return value
    node = value.node
    result = node.expr.xreplace({symbol: sympy.Integer(v) for symbol, v in sizes.items()})
    if not result.is_number and result not in (sympy.true, sympy.false):
        return None
    return node.pytype(result)


def guards_of(values: Iterable[Any]) -> Any:
    """Return the conditions on open sizes under which a captured graph is valid.

    Args:
        values: the example values of the graph's inputs, among which are symbolic sizes.

    Returns:
        torch's ``ShapeEnv``, for :func:`guards_hold`; ``None``: no size is open.
    """
    for value in values:
        numbers = [value] if is_symbolic(value) else []
        if isinstance(value, Tensor):
            numbers = [size for size in value.shape if is_symbolic(size)]
        for number in numbers:
            return number.node.shape_env
    return None


def guards_hold(shape_env: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether the conditions on open sizes of a captured graph hold for given sizes.

    TorchDynamo takes every open size to be at least 2, whatever the code asks. A size of 1 passes
    here, since operations on open sizes treat it like any other (but for ``squeeze``).

    Args:
        shape_env: the conditions, from :func:`guards_of`; ``None``: there are none.
        sizes: the values, by sympy symbol.
    """
    if shape_env is None:
        return True
    known = {symbol: sympy.Integer(value) for symbol, value in sizes.items()}
    for guard in shape_env.guards:
        if shape_env.replace(guard.expr).xreplace(known) == sympy.false:
            return False
    ranges = shape_env.var_to_range
    return all(
        s not in ranges or ranges[s].lower <= max(v, 2) <= ranges[s].upper for s, v in known.items()
    )


def expression(number: Any, same: Mapping[Any, Any]) -> Any:
    """Return a size or number as a sympy expression.

    Args:
        number: the number, symbolic or plain.
        same: what to put in the place of symbols, by symbol.
    """
    return number.node.expr.xreplace(same) if is_symbolic(number) else sympy.sympify(number)


def follows_from_values(symbol: Any) -> bool:
    """Whether a symbol is for a number read from a tensor, or a size that depends on one."""
    return _READ.fullmatch(str(symbol)) is not None
