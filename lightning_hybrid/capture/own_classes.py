"""Arguments of a network that are of a subclass of Tensor, such as MONAI's MetaTensor.

Stages compute with ordinary tensors. Two kinds of subclasses change no number: those with torch's
default ``__torch_function__``, which only gives results the class, and MONAI's, which also keeps a
description. For these the network is called on ordinary tensors in the same memory, and what it
returns gets the class that it would have on one device. Inside of containers they are refused,
since the network may write to a container. Any other ``__torch_function__`` may do anything, and
TorchDynamo does not follow all of it, so such a class is refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid._trees import rebuild
from lightning_hybrid.remote import Intercepted

_CARRIES_A_DESCRIPTION = "monai.data.meta_tensor.MetaTensor"

_default = cast(Any, Tensor.__torch_function__).__func__


def refused_class(tensor: Tensor) -> str | None:
    """Why stages cannot compute with a tensor of this class; ``None``: they can.

    The text is one for `NotCaptured.reason`, and says what to do instead.
    """
    kind = type(tensor)
    if _function_of(kind) is None or is_followed(kind):
        return None
    return (
        f"a tensor is a {_name(kind)}, whose __torch_function__ takes part in each operation; "
        "give the network an ordinary one (tensor.as_subclass(torch.Tensor))"
    )


def plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor in the same memory, if the tensor is of a subclass that changes no number.

    Any other tensor is returned as it is.
    """
    if not is_followed(type(tensor)):
        return tensor
    with as_they_are():
        return tensor.as_subclass(Tensor)


def in_own_classes(result: Any, first: Tensor, given: Mapping[int, Tensor]) -> Any:
    """Give the results of a call on ordinary tensors the classes that users expect.

    These are the classes that the results have without stages.

    Args:
        result: what the network has returned: a tensor, or containers with tensors and other
            values.
        first: the first argument of a subclass of Tensor, as the user gave it.
        given: all arguments of a subclass, each by the ``id`` of the ordinary tensor (from `plain`)
            that took its place.

    Returns:
        ``result`` with other tensors, in copies of its containers. An argument that is returned is
        the user's tensor again; any other ordinary tensor becomes one of the class of ``first``.
    """

    def followed(part: Any) -> Any:
        if id(part) in given:
            return given[id(part)]
        if type(part) is not Tensor:
            return part
        # (of an operation on several tensors torch gives the result the class of the first)
        kind: Any = type(first)
        return kind.__torch_function__(_second, (kind,), (first, part))

    return rebuild(result, followed)


def _second(_: Tensor, second: Tensor) -> Tensor:
    return second


def _function_of(kind: type[Tensor]) -> Callable[..., Any] | None:
    """A class's own ``__torch_function__``; ``None`` for torch's and this package's classes."""
    if kind in (Tensor, nn.Parameter) or issubclass(kind, Intercepted):
        return None
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a part of torch's engine
        return None
    return getattr(kind.__torch_function__, "__func__", None)


def is_followed(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor changes no number, so that ordinary tensors can replace it.

    False for Tensor itself.
    """
    if kind is Tensor:
        return False
    return _function_of(kind) is _default or _name(kind) == _CARRIES_A_DESCRIPTION


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
