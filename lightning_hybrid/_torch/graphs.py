"""The nodes of captured graphs: autocast and checkpointed regions, operators, calls of NumPy."""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from lightning_hybrid._torch.private_names import find

_HigherOrder = find("torch._ops:HigherOrderOperator")
_OPERATORS = (find("torch._ops:OpOverload"), find("torch._ops:OpOverloadPacket"))
_name_by_fx = find("torch.fx.node:_get_qualified_name")
_registered = find("torch._library.simple_registry:singleton")

# the function that a captured graph calls for `with torch.autocast(...)`
_enter_autocast = find("torch.amp.autocast_mode:_enter_autocast")

set_gradients = find("torch:_C._set_grad_enabled")
"""The function that a captured graph calls for `with torch.no_grad()` and the like."""

attention_of_cpu = find("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu")
"""The kernel of attention on CPUs, which torch's `FlopCounterMode` counts as 0 operations."""

exit_autocast = find("torch.amp.autocast_mode:_exit_autocast")
"""The function that a captured graph calls to end a region of autocast; its argument is the node
that has begun the region."""


def is_enter_autocast(node: fx.Node) -> bool:
    """Whether a node begins a region of ``torch.autocast`` (with it on, or off)."""
    return node.target is _enter_autocast


def entered_autocast(node: fx.Node) -> Any:
    """Return the node that has begun the region of autocast which a node ends.

    ``None``: the node ends none.
    """
    return node.args[0] if node.target is exit_autocast else None


@cache
def _numpy() -> dict[str, tuple[Any, str]]:
    """For each kind of call of NumPy in a captured graph, how the target of its node looks.

    That is the class of the target, and the name of its attribute with NumPy's function, method or
    operator. (Looked up when it is needed first, since otherwise a process that only serves would
    load TorchDynamo.)
    """
    return {
        "function": (find("torch._dynamo.utils:numpy_to_tensor_wrapper"), "f"),
        "method": (find("torch._dynamo.utils:numpy_method_wrapper"), "method"),
        "operator": (find("torch._dynamo.utils:numpy_operator_wrapper"), "op"),
    }


def parts_of_numpy(function: Any) -> tuple[str, Any] | None:
    """Take the target of a node apart, if the node calls NumPy.

    Args:
        function: the target of a node in a captured graph.

    Returns:
        The kind of call, and NumPy's function, method or operator, from which `numpy_from_parts`
        makes a target; ``None``: the node does not call NumPy.
    """
    for kind, (wrapper, attribute) in _numpy().items():
        if type(function) is wrapper:
            return kind, getattr(function, attribute)
    return None


def numpy_from_parts(kind: str, called: Any) -> Any:
    """Make the target for a node that calls NumPy.

    Args:
        kind: the kind of call, as `parts_of_numpy` returns it.
        called: NumPy's function, method or operator, likewise.
    """
    return _numpy()[kind][0](called)


_SOURCE = "_dynamo_source"


def placeholder_source(placeholder: fx.Node) -> str:
    """Return the Python expression, in the captured frame, of the value of a graph's placeholder.

    There is no public way: the placeholder's name is that expression with all but letters replaced.
    """
    source = getattr(placeholder, _SOURCE, None)
    return placeholder.name if source is None else str(source.name)


def copy_source(placeholder: fx.Node, copy: fx.Node) -> None:
    """Copy the expression of a graph's placeholder to a copy of it, for `placeholder_source`."""
    if hasattr(placeholder, _SOURCE):
        setattr(copy, _SOURCE, getattr(placeholder, _SOURCE))


def higher_order_name(function: Any) -> str | None:
    """Return the name of a higher-order operator; ``None``: the function is none.

    Such an operator takes graphs as arguments, and stands for a checkpointed region, for example.
    """
    return function.name() if isinstance(function, _HigherOrder) else None


def is_region(node: fx.Node) -> bool:
    """Whether a node of a captured graph is a region under `torch.utils.checkpoint`."""
    return higher_order_name(node.target) == "tag_activation_checkpoint"


def is_custom_operator(function: Any) -> bool:
    """Whether a function is an operator that other code than torch has registered."""
    packet = isinstance(function, _OPERATORS)
    return packet and not str(function).startswith(("aten.", "prims.", "prim."))


def names_of_operator(function: Any) -> Iterator[str]:
    """Yield ``module:name`` by which an operator may be found; nothing for other functions."""
    if isinstance(function, _OPERATORS):
        yield f"torch:ops.{function!s}"
    name = higher_order_name(function)
    if name is not None:
        yield f"torch:ops.higher_order.{name}"
        yield f"torch._higher_order_ops:{name}"
        yield f"torch._higher_order_ops.wrap:{name}"


def modules_of_operator(function: Any) -> Iterator[str]:
    """Yield names of modules that may register a custom operator when imported, likeliest first.

    Only modules that this process has imported; none for other functions.
    """
    if not is_custom_operator(function):
        return
    name = str(function).removesuffix(".default").replace(".", "::", 1)
    kernel = _registered.find(name).fake_impl.kernel  # which tells where its shapes were defined
    if kernel is not None:
        file = Path(kernel.source.rpartition(":")[0])
        for module, value in [*sys.modules.items()]:
            other = Path(getattr(value, "__file__", None) or "")
            if other.name == file.name and other.resolve() == file.resolve():
                yield module
    space = name.partition("::")[0]  # as in packages with operators of C++
    if space in sys.modules:
        yield space


def qualified_name_by_fx(function: Any) -> str:
    """Return the dotted name that fx writes into generated code for a function."""
    return str(_name_by_fx(function))
