"""Compares the results of two calls of a network: nested tensors and numbers, up to rounding."""

from cmath import isclose
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import PathStep, children
from lightning_hybrid.capture import plain

_PLAIN = (bool, int, float, complex, str, type(None))


def differences(found: Any, expected: Any, epsilon: float, *, part: bool = False) -> list[str]:
    """Describe where two results differ, one text for each place.

    No text: they agree within rounding (sums in another order are rounded otherwise). Real numbers
    of a tensor may differ by about sqrt(epsilon) times its largest number, or epsilon times the
    largest of all tensors if that is more; floats outside of tensors by about sqrt(epsilon) times
    their size. All else must be equal; NaN equals NaN.

    Args:
        found: the result of one call: tensors and numbers in lists, dictionaries, dataclasses, ...;
            other objects are not compared.
        expected: the result of the other call, in the same structure, perhaps on another device.
        epsilon: the precision in which both were computed, as in `torch.finfo`.
        part: whether ``expected`` is the result for the first samples only. How many these are is
            read from the sizes of its tensors. Numbers and texts outside of tensors possibly depend
            on how many samples there are, so they are not compared then.
    """
    one, other = dict(_leaves(found)), dict(_leaves(expected))
    largest = max((_largest(v) for v in other.values() if isinstance(v, Tensor)), default=0.0)
    reasons = [f"{path} is missing" for path in other.keys() - one.keys()]
    reasons += [f"{path} should not be there" for path in one.keys() - other.keys()]
    for path in one.keys() & other.keys():
        reason = _difference(one[path], other[path], epsilon, largest, part=part)
        if reason is not None:
            reasons.append(f"{path} {reason}")
    return sorted(reasons)


def first_samples(result: Any, part: Any) -> dict[str, Any]:
    """The tensors of a result, each cut to the sizes that it has in ``part``.

    They are keyed by the expressions that reach them. Tensors that ``part`` lacks are left out.

    Args:
        result: the result for a whole batch.
        part: the result for the first samples of that batch.
    """
    sizes = {path: v.shape for path, v in _leaves(part) if isinstance(v, Tensor)}
    return {
        path: _first(value, sizes[path])
        for path, value in _leaves(result)
        if isinstance(value, Tensor) and path in sizes
    }


def leaves_in(attributes: dict[str, Any]) -> dict[str, Any]:
    """The tensors, numbers and texts in attributes, keyed by the expression that reaches each.

    For example, `self.net.parts[0]`. Parameters are left out (`nn.LSTM` has a list of its own):
    they may have no memory here.
    """
    return dict(_leaves(attributes, parameters=False))


def changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The leaves of ``now`` that are missing in ``before``, or have another value there.

    Args:
        now: leaves by the expressions that reach them, as :func:`leaves_in` gives them.
        before: likewise.
    """
    return {
        path: value
        for path, value in now.items()
        if path not in before or _difference(before[path], value, 0.0, 0.0, part=False) is not None
    }


def numbers_in(result: Any) -> dict[str, Any]:
    """The values in a result that are not tensors (numbers, texts, orders of dictionaries).

    They are keyed by the expressions that reach them.
    """
    return {path: v for path, v in _leaves(result) if not isinstance(v, Tensor)}


def epsilon_of(found: Any, device: torch.device) -> float:
    """The epsilon of the lowest precision in which a result was possibly computed.

    It follows from the types of tensors, autocast and TF32; 0: there is no tensor of real numbers.

    Args:
        found: the result, perhaps together with the weights.
        device: the device that has computed it.
    """
    types = [leaf.dtype for _, leaf in _leaves(found) if isinstance(leaf, Tensor)]
    if torch.is_autocast_enabled(device.type):
        types.append(torch.get_autocast_dtype(device.type))
    precisions = [torch.finfo(t).eps for t in types if t.is_floating_point or t.is_complex]
    if device.type == "cuda" and torch.float32 in types:
        precisions.append(_TENSOR_FLOAT_32)
    return max(precisions, default=0.0)


_TENSOR_FLOAT_32 = 2.0**-10
"""The precision of float32 convolutions on GPUs, and of products where TF32 is allowed."""


def _leaves(value: Any, path: str = "", *, parameters: bool = True) -> Iterator[tuple[str, Any]]:
    """Each tensor, number and text in a result, behind the expression that reaches it.

    So is the order of the keys of an OrderedDict, as a text. Other objects are left out.

    Args:
        value: the result, or a part of it.
        path: the expression that reaches it.
        parameters: whether parameters are among the tensors.
    """
    if isinstance(value, Tensor):
        if parameters or not isinstance(value, nn.Parameter):
            yield path, plain(value)
        return
    parts = children(value)
    if parts is None:
        if isinstance(value, _PLAIN):
            yield path, value
        return
    # (code may depend on the order, which the paths of the parts do not tell)
    if isinstance(value, OrderedDict):
        yield f"the order of {path}", str([*value])
    for number, (step, inner) in enumerate(parts):
        yield from _leaves(inner, _after(path, step, number), parameters=parameters)


def _after(path: str, step: PathStep, number: int) -> str:
    """Extend an expression by one step: by an attribute (``a.b``) or a key (``a['b']``).

    Keys that are objects count by their number: a copy has others in their places. (And a weight,
    as in what `toggle_optimizer` keeps, may have no memory here, so that it cannot be printed.)
    """
    kind, key = step
    if kind != "attr" and not all(isinstance(k, _PLAIN) for k in _parts_of(key)):
        return f"{path}[key {number}, {type(key).__name__}]"
    if not path:
        return str(key)
    return f"{path}.{key}" if kind == "attr" else f"{path}[{key!r}]"


def _parts_of(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _difference(one: Any, other: Any, epsilon: float, largest: float, *, part: bool) -> str | None:
    """How a leaf differs from the expected one, in words; ``None``: it does not.

    Args:
        one: the leaf.
        other: the expected leaf.
        epsilon: see :func:`differences`.
        largest: the largest number in all tensors of the expected result.
        part: see :func:`differences`.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return _of_numbers(one, other, epsilon, part=part)
    with as_they_are(), torch.no_grad():
        shape = tuple(one.shape)
        if part:
            one = _first(one, other.shape)
        if one.shape != other.shape or one.dtype != other.dtype:
            return (
                f"is of shape {shape} and {one.dtype} and should be of "
                f"{tuple(other.shape)}{' in its first samples' if part else ''} and {other.dtype}"
            )
        one, other = _dense(one), _dense(other).to(one.device)
        if torch.equal(one, other):
            return None
        if not one.is_floating_point():
            count = int((one != other).sum())
            return f"of shape {shape} differs in {count} of {other.numel()} numbers"
        rtol, atol = epsilon**0.5, epsilon**0.5 * max(_largest(other), epsilon**0.5 * largest)
        if torch.allclose(one, other, rtol, atol, equal_nan=True):
            return None
        apart = (one.double() - other.double()).abs()
        return (
            f"of shape {shape} differs by up to {_largest(apart):.3g}, where the largest number is "
            f"{_largest(other):.3g}"
        )


def _of_numbers(one: Any, other: Any, epsilon: float, *, part: bool) -> str | None:
    if type(one) is not type(other):
        return f"is {_kind(one)} and should be {_kind(other)}"
    # (a number that is not equal to itself is NaN)
    if part or one == other or (one != one and other != other):
        return None
    # (`isclose` takes no other number for close to an infinite one)
    if isinstance(one, float | complex) and isclose(one, other, rel_tol=epsilon**0.5):
        return None
    return f"is {one!r} and should be {other!r}"


def _first(value: Tensor, sizes: torch.Size) -> Tensor:
    if value.dim() != len(sizes):
        return value
    return value[tuple(map(slice, sizes))]


def _dense(value: Tensor) -> Tensor:
    value = value.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def _largest(value: Tensor) -> float:
    with as_they_are(), torch.no_grad():
        if not value.numel() or not (value.is_floating_point() or value.is_complex()):
            return 0.0
        finite = _dense(value).abs().double().nan_to_num(0.0, 0.0, 0.0)
        return float(finite.max())
