"""Tensors: their memory, their versions, and what stands in for them or hears of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_hybrid._torch.private_names import find

if TYPE_CHECKING:
    from torch._C import DisableTorchFunctionSubclass as as_they_are
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    # switches off __torch_function__ of subclasses, all of it, getters included; torch documents it
    # for writers of subclasses ("Extending PyTorch") under this name
    as_they_are = find("torch:_C.DisableTorchFunctionSubclass")

    # makes tensors with shapes and no memory; torch.export uses it, there is no public way to do so
    FakeTensorMode = find("torch._subclasses.fake_tensor:FakeTensorMode")

    # hears of every operation below autograd; torch documents it and has no public place for it
    TorchDispatchMode = find("torch.utils._python_dispatch:TorchDispatchMode")

# switches __torch_function__ on again, inside of the other
as_the_user_sees_them = find("torch:_C._EnableTorchFunction")

_FakeTensor = find("torch._subclasses.fake_tensor:FakeTensor")
_owners = find("torch:_C._storage_Use_Count")
_swap = find("torch:_C._swap_tensor_impl")
_refuse_pointer = find("torch:_C._set_throw_on_mutable_data_ptr")
_function_modes = find("torch.overrides:_get_current_function_mode_stack")
_dispatch_modes = find("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")
without_dispatch_modes = find("torch.utils._python_dispatch:_disable_current_modes")
_DeviceContext = find("torch.utils._device:DeviceContext")
_OURS = __name__.partition(".")[0] + "."

__all__ = ["FakeTensorMode", "TorchDispatchMode", "as_the_user_sees_them", "as_they_are"]


def _copy_one_by_one(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


# one call for many tensors, which is what torch's own optimizers use; there is no public name
_copy_each = find("torch:_foreach_copy_", _copy_one_by_one)


def version(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to; autograd compares it too.

    In inference mode nobody counts.
    """
    return 0 if tensor.is_inference() else tensor._version


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors in one place are equal; others are taken to differ."""
    dense = one.layout is other.layout is torch.strided and one.device == other.device
    return dense and torch.equal(one, other)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells living storages apart; those on the meta device all have the data pointer 0."""
    key: int = storage._cdata
    return key


def is_shared(tensor: Tensor, *, besides: int = 0) -> bool:
    """Whether something else may show a tensor's memory: a view, a saved one, a storage object.

    Args:
        tensor: strided.
        besides: how many others that show it are known.
    """
    storage = tensor.untyped_storage()
    owners: int = _owners(storage._cdata)
    return owners > 2 + besides  # the tensor, and the storage object of this function


def is_held(tensor: Tensor) -> bool:
    """Whether something beside Python holds a tensor itself: a graph that it is a leaf of.

    Such a graph has not saved its memory, and reads that of the tensor when it goes backward.
    """
    holders: int = tensor._use_count()  # type: ignore[attr-defined]
    return holders > 1  # Python's object


def refuse_pointer(tensor: Tensor) -> None:
    """From here on torch raises where somebody asks for the address of this tensor's memory."""
    if _refuse_pointer is not None:
        _refuse_pointer(tensor)


def schema(operator: Any) -> Any:
    """What an operator takes, returns and writes to; dispatch modes are given nothing else."""
    return operator._schema


def arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the operator's schema, with its defaults."""
    described = schema(operator).arguments
    defaults = {each.name: each.default_value for each in described if each.has_default_value()}
    return defaults | dict(zip((each.name for each in described), args)) | dict(kwargs)


def swap_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange all that two tensor objects hold; hooks stay with the objects.

    `torch.utils.swap_tensors` does this, but refuses tensors that somebody has weak references to
    (recurrent layers have some to their own weights), and loses hooks.
    """
    hooks, late = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    _swap(tensor, other)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if late is not None:
        tensor._post_accumulate_grad_hooks = late


HookTables = tuple[dict[int, Any] | None, dict[int, Any] | None]
"""Of a tensor: those that hear of a gradient before and after it is added to others."""


def take_hooks(tensor: torch.Tensor) -> HookTables:
    """Take the functions that hear of a gradient off a tensor; there is no public way to do so.

    Handles by which the user removes them still do.
    """
    tables = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    # for torch ``None`` is no hooks at all, but for the second kind it keeps those that were there
    put_hooks(tensor, (None, tables[1] and {}))
    return tables


def put_hooks(tensor: torch.Tensor, tables: HookTables) -> None:
    """Put back what :func:`take_hooks` has taken off."""
    anything: Any = tensor  # which may be without them, though the types do not tell
    anything._backward_hooks, late = tables
    if late is not None:
        anything._post_accumulate_grad_hooks = late


def gradient_hooks(tensor: torch.Tensor, *, late: bool = False) -> list[Any]:
    """The functions that hear of the gradient of a parameter; there is no public way to ask.

    Args:
        tensor: the parameter.
        late: only those that are called when the gradient is in ``tensor.grad``.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if not (before or after):  # asked of each parameter in every step
        return []
    return [hook for table in (None if late else before, after) for hook in (table or {}).values()]


def is_fake(value: Any) -> bool:
    """Whether a tensor has a shape and no memory, and no other mode looks at it."""
    return type(value) is _FakeTensor


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of the sources into the target at its place, with one call for all."""
    with torch.no_grad():
        _copy_each(targets, sources)


def users_mode() -> object | None:
    """The innermost mode that is neither torch's own nor ours; ``None``: there is none.

    `torch.utils.flop_counter.FlopCounterMode` is such a one, and every subclass of
    ``TorchDispatchMode`` and ``TorchFunctionMode`` of the user's. A device as a context only says
    where tensors are made, which a network that is captured does as well.
    """
    seeing = [m for m in _dispatch_modes() if not _is_infrastructure(m)]
    seeing += [m for m in _function_modes() if not isinstance(m, _DeviceContext)]
    return next((m for m in reversed(seeing) if not type(m).__module__.startswith(_OURS)), None)


def _is_infrastructure(mode: object) -> bool:
    return not isinstance(mode, TorchDispatchMode) or mode.is_infra_mode()
