"""Tensors of another rank that look like tensors of this one.

A window is an ordinary tensor object whose class hears of every operation on it: identity, shape,
``requires_grad`` and the place in modules and optimizers stay, and what stands behind it
(:class:`Behind`) is asked before the values are used and told when they have changed.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hybrid._torch import as_they_are, version
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.errors import HybridError


class Behind(Protocol):
    """What a window asks and tells."""

    name: str

    def read(self) -> None: ...
    def touch(self) -> None: ...
    def enter_graph(self) -> None: ...
    def gradient(self) -> Tensor | None: ...
    def assign_gradient(self, value: Tensor | None) -> None: ...


class _Listens:
    """What both classes of windows have in common."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operate(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        plain = _plain(self)
        copied = plain.detach().clone(memory_format=torch.preserve_format)
        is_parameter = isinstance(plain, nn.Parameter)
        result = nn.Parameter(copied, plain.requires_grad) if is_parameter else copied
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class Window(_Listens, Tensor):
    """A buffer, a gradient, or memory shared with one of these or with a parameter."""


class RemoteParameter(_Listens, nn.Parameter):
    """A parameter that another rank owns."""


def open_window(tensor: Any, behind: Behind) -> Tensor:
    """Make a window of a tensor; it stays the same object."""
    tensor.__class__ = RemoteParameter if isinstance(tensor, nn.Parameter) else Window
    tensor._behind = behind
    window: Tensor = tensor
    return window


def shut_window(tensor: Any) -> None:
    """Make an ordinary tensor of a window."""
    # one with several names is shut once
    plain: dict[type, type] = {RemoteParameter: nn.Parameter, Window: Tensor}
    tensor.__class__ = plain.get(type(tensor), type(tensor))
    vars(tensor).pop("_behind", None)


def read_now(tensor: Tensor) -> Tensor:
    """What a tensor without gradient holds now, as an ordinary tensor that asks nobody later."""
    if not isinstance(tensor, _Listens) or tensor.requires_grad:
        return tensor
    _behind(tensor).read()
    with as_they_are():
        return tensor.detach()


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation of torch with a window among its arguments."""
    if func in _LOOKS:
        with as_they_are():
            return func(*args, **kwargs)
    if args and isinstance(args[0], RemoteParameter):
        if func in _HOOKS:
            _refuse_hook(args[0])
        if func == _GET_GRADIENT:
            return _behind(args[0]).gradient()
        if func in _SET_GRADIENT:
            return _behind(args[0]).assign_gradient(args[1] if len(args) > 1 else None)
    windows = [t for t in _tensors((args, kwargs)) if isinstance(t, _Listens)]
    with as_they_are():
        for window in windows:
            _behind(window).read()
        before = [version(window) for window in windows]
        result = func(*args, **kwargs)
        for window, count in zip(windows, before):
            written = func in _NORMS and not isinstance(window, RemoteParameter)
            if written or version(window) != count or func == _SET_DATA:
                _behind(window).touch()
        if torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(result)):
            _enter_graph(windows)
        return _same_memory(result, windows)


def _enter_graph(windows: Sequence[Tensor]) -> None:
    for window in windows:
        if isinstance(window, RemoteParameter) and window.requires_grad:
            _behind(window).enter_graph()


def _same_memory(result: Any, windows: Sequence[Tensor]) -> Any:
    """A result that shows the memory of a window is a window too (``data``, ``detach()``, views).

    Inside of a graph it stays as it is: there a view counts its changes for the parameter too.
    """
    if type(result) is Tensor and not result.requires_grad and result.layout is torch.strided:
        address = result.untyped_storage().data_ptr()
        for window in windows:
            if address and address == window.untyped_storage().data_ptr():
                return open_window(result, _behind(window))
    return result


def _refuse_hook(parameter: Tensor) -> None:
    raise HybridError(
        f"A hook was put on parameter {_behind(parameter).name!r} in the middle of a run, but "
        "another rank owns it and its gradient arises there. Put hooks on parameters in __init__, "
        "setup or configure_model, which every rank runs; or read and change parameter.grad after "
        "the backward."
    )


def _plain(window: Any) -> Tensor:
    """What a window shows, as an ordinary tensor on the same memory."""
    with as_they_are():
        _behind(window).read()
        if isinstance(window, RemoteParameter):
            return nn.Parameter(window.detach(), window.requires_grad)
        return window.detach()  # type: ignore[no-any-return]


def _behind(window: Any) -> Behind:
    behind: Behind = window._behind
    return behind


def _tensors(value: Any) -> Iterator[Tensor]:
    return (tensor for _, tensor in tensors_in(value))


_GETTERS = [
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
    *("requires_grad", "is_leaf", "grad_fn", "output_nr", "_version"),
    *("is_cuda", "is_cpu", "is_meta", "is_xla", "is_sparse", "is_sparse_csr", "is_quantized"),
    *("is_mkldnn", "is_nested"),
]
_METHODS = [
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset"),
    *("is_contiguous", "element_size", "is_floating_point", "is_complex", "is_signed"),
    *("is_same_size", "is_inference", "is_pinned", "get_device"),
    *("requires_grad_", "retain_grad"),
]
_LOOKS = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS),
    *(getattr(Tensor, name) for name in _METHODS),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""Operations that have nothing to do with the values."""

_NORMS = {
    *(F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm),
    *(torch.native_batch_norm, torch.cudnn_batch_norm, torch.miopen_batch_norm),
}
"""They change running statistics, and the version counters of these do not tell."""

_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook}
_GRADIENT: Any = Tensor.grad
_GET_GRADIENT, _SET_GRADIENT = _GRADIENT.__get__, {_GRADIENT.__set__, _GRADIENT.__delete__}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
