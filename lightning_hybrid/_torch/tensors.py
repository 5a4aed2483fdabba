"""Tensors: their memory, versions and hooks, fake ones, and modes that intercept operations."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

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

    # makes tensors with shapes and no memory; torch.export uses it; there is no public way
    FakeTensorMode = find("torch._subclasses.fake_tensor:FakeTensorMode")

    # intercepts every operation below autograd; torch documents it, but it has no public name
    TorchDispatchMode = find("torch.utils._python_dispatch:TorchDispatchMode")

# switches __torch_function__ on again, inside of `as_they_are`
as_the_user_sees_them = find("torch:_C._EnableTorchFunction")

_FakeTensor = find("torch._subclasses.fake_tensor:FakeTensor")
_owners = find("torch:_C._storage_Use_Count")
_swap = find("torch:_C._swap_tensor_impl")
_refuse_pointer = find("torch:_C._set_throw_on_mutable_data_ptr")
without_dispatch_modes = find("torch.utils._python_dispatch:_disable_current_modes")

# inside, shapes of fake tensors are computed in Python, as TorchDynamo has it: torch's C++ code for
# some operators (baddbmm, complex) turns a free size into that of the capture, or fails
python_dispatcher = find("torch._dispatch.python:enable_python_dispatcher", nullcontext)

__all__ = ["FakeTensorMode", "TorchDispatchMode", "as_the_user_sees_them", "as_they_are"]

_T = TypeVar("_T", bound=Tensor)


# one call for many tensors, which is what torch's own optimizers use; there is no public name
_copy_each = find("torch:_foreach_copy_")
_multiply_each = find("torch:_foreach_mul_")
# the norm of each of many tensors, as `torch.nn.utils.get_total_norm` computes them
norm_each = find("torch:_foreach_norm")
# (gradients of one type, number that becomes 1 if one is not finite, factor): as GradScaler does
unscale_each = find("torch:_amp_foreach_non_finite_check_and_unscale_")


def version(tensor: Tensor) -> int:
    """Return how often a tensor's memory was written to; autograd compares the same number.

    An inference tensor does not count writes: for it 0 is returned.
    """
    return 0 if tensor.is_inference() else tensor._version


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are dense, on the same device, and equal in size and all numbers."""
    dense = one.layout is other.layout is torch.strided and one.device == other.device
    return dense and torch.equal(one, other)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key for a storage that no other living storage has, also on the meta device."""
    key: int = storage._cdata
    return key


def is_shared(tensor: Tensor) -> bool:
    """Whether something else uses the memory of a strided tensor.

    That is another tensor, such as a view, a tensor that autograd has saved, or a Python storage
    object.
    """
    storage = tensor.untyped_storage()
    owners: int = _owners(storage._cdata)
    return owners > 2  # the tensor, and the storage object of this function


def is_composed(tensor: Tensor) -> bool:
    """Whether a tensor's class keeps its numbers in other tensors, as for quantised weights."""
    return hasattr(type(tensor), "__tensor_flatten__")


def has_tensors(storage: torch.UntypedStorage) -> bool:
    """Whether any tensor still uses this memory.

    The caller must hold the only Python storage object of it, which counts as one owner.
    """
    owners: int = _owners(storage._cdata)
    return owners > 1


def is_held(tensor: Tensor) -> bool:
    """Whether C++ code holds the tensor object itself, as an autograd graph holds its leaves.

    Such a graph has possibly saved no memory of the tensor: its backward then reads the memory that
    the tensor has at that time.
    """
    holders: int = tensor._use_count()  # type: ignore[attr-defined]
    return holders > 1  # the first is Python's object


def refuse_pointer(tensor: Tensor) -> None:
    """Have torch raise an error when code asks for the address of a tensor's memory from now on.

    Does nothing if this version of torch cannot do so.
    """
    if _refuse_pointer is not None:
        _refuse_pointer(tensor)


def schema(operator: Any) -> Any:
    """Return the schema of an operator: what it takes, returns and writes to.

    Args:
        operator: the operator, as dispatch modes get it.
    """
    return operator._schema


def arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call of an operator by their names, defaults included.

    Args:
        operator: the operator, as dispatch modes get it.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """
    described = schema(operator).arguments
    defaults = {each.name: each.default_value for each in described if each.has_default_value()}
    return defaults | dict(zip((each.name for each in described), args)) | dict(kwargs)


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws from a random generator.

    torch's own tag for it is also on dropout, attention and recurrent layers, which draw only in
    training and with a rate above zero.

    Args:
        operator: the operator, as dispatch modes get it.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    if operator.namespace != "aten":
        return True  # its author has tagged it so
    given = arguments(operator, args, kwargs)
    rates = ("dropout_p", "dropout", *(["p"] if "train" in given else []))
    trains = all(given.get(name) is not False for name in ("train", "training"))
    return trains and all(given.get(name) != 0 for name in rates)


def swap_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensor objects are, such as memory, size and type; hooks are kept.

    The hooks on the gradient of ``tensor`` stay on it. `torch.utils.swap_tensors` does the same,
    but loses hooks, and refuses tensors to which there are weak references (recurrent layers have
    some to their own weights).
    """
    hooks, late = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    _swap(tensor, other)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if late is not None:
        tensor._post_accumulate_grad_hooks = late


HookTables = tuple[dict[int, Any] | None, dict[int, Any] | None]
"""A tensor's hooks on its gradient: those called before, and after, it is accumulated."""


def take_hooks(tensor: torch.Tensor) -> HookTables:
    """Remove all hooks on the gradient of a tensor, and return them for `put_hooks`.

    The handles that the user has can still remove these hooks. There is no public way to do this.
    """
    tables = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    # ``None`` removes hooks of the first kind; of the second it would keep those that were there
    put_hooks(tensor, (None, tables[1] and {}))
    return tables


def put_hooks(tensor: torch.Tensor, tables: HookTables) -> None:
    """Put hooks that :func:`take_hooks` has returned on the gradient of a tensor.

    Args:
        tensor: the tensor.
        tables: the hooks. A second table of ``None`` leaves the tensor's hooks of that kind.
    """
    anything: Any = tensor  # (torch's annotations do not allow ``None``)
    anything._backward_hooks, late = tables
    if late is not None:
        anything._post_accumulate_grad_hooks = late


def gradient_hooks(tensor: torch.Tensor, *, late: bool = False) -> list[Any]:
    """Return the hooks on the gradient of a parameter; there is no public way to ask.

    Args:
        tensor: the parameter.
        late: whether to return only those that are called after the gradient was accumulated in
            ``tensor.grad``.
    """
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [hook for table in (None if late else before, after) for hook in (table or {}).values()]


def with_gradient_hooks(tensors: Iterable[_T]) -> list[_T]:
    """Return those of some parameters that have hooks on their gradients; fast."""
    return [t for t in tensors if t._backward_hooks or t._post_accumulate_grad_hooks]


def is_fake(value: Any) -> bool:
    """Whether a value is exactly a `FakeTensor`, a shape without memory, and of no subclass."""
    return type(value) is _FakeTensor


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target with the same index, with one call of torch for all."""
    with torch.no_grad():
        _copy_each(targets, sources)


def multiply_each(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a factor, with one call of torch for many.

    Args:
        tensors: tensors on one device.
        factor: a scalar tensor on the same device. The host does not read it, except on the CPU,
            where nothing is done if it is 1.
    """
    if factor.device.type == "cpu" and factor == 1:
        return
    with torch.no_grad():
        for dtype in {tensor.dtype for tensor in tensors}:
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            if dtype.itemsize > 2 and all(t.layout is torch.strided for t in alike):
                _multiply_each(alike, factor.to(dtype))
                continue
            for tensor in alike:
                # (a factor in half precision would be rounded, too)
                wide = tensor.float() if dtype.itemsize == 2 else tensor
                tensor.copy_(wide * factor.to(wide.dtype))
