"""Parameters and buffers that have no memory on this rank, for a network that is whole on none.

A deferred tensor is the object that it will stay, of a class that intercepts the operations on it
(:mod:`lightning_hybrid.remote.intercepted`). How its numbers are made is known to its *maker*
(:class:`lightning_hybrid.remote.deferral.Deferral`).

* Looking (size, type, device) costs nothing.
* Reading makes the numbers in temporary memory. So even a whole network runs, slowly.
* What is written to, and what enters a graph, is materialized for good.
* `materialize` makes the tensors of a stage; `offload` marks those that another rank has. Reading
  one of these is an error that says where it is.

Parameters that have given their memory back while another rank trains them.

A vacant one is the object that it was, with its size and type, and an empty storage. Nothing may
compute with it: many operations on CPUs would read at address 0. So it is a proxy to the user's
code, which fetches the numbers first, or on a rank where no code of the user's runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import (
    TorchDispatchMode,
    as_they_are,
    is_held,
    is_shared,
    schema,
    storage_key,
    swap_memory,
    version,
)
from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.intercepted import (
    LOOKS,
    Intercepted,
    getters,
    intercepted_in,
    ordinary,
)


class Maker:
    """Knows how the numbers of deferred tensors are made: base of those that do.

    Attributes:
        active: whether the module is being built: then operations are noted down.
        on_one_rank: whether only the rank that owns a tensor will have it.
    """

    active = on_one_rank = False

    def numbers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The numbers that tensors without memory would have; views of one share memory."""
        raise NotImplementedError

    def settle(self, tensor: Tensor, value: Tensor) -> None:
        """Let a tensor, and all that show the same memory, have that of ``value``."""
        raise NotImplementedError

    def open(self, tensor: Tensor, name: str) -> None:
        """Make a deferred tensor of one without memory, which this one knows."""
        raise NotImplementedError

    def make(self, tensor: Tensor) -> None:
        """Give a tensor, and all that show the same memory, memory for good."""
        self.settle(tensor, self.numbers([tensor])[0])

    def pickled(self, tensor: Tensor) -> Any:
        """What pickles a tensor in its own way; ``None``: as an ordinary one."""
        return None


class _Deferred(Intercepted):
    """What both classes of deferred tensors have in common."""

    _maker: Maker | None
    """``None``: another rank has the tensor"""
    _full_name: str
    _where: str
    _trained_elsewhere: bool = False
    """for code of the user's, which looks for its gradient here"""

    @classmethod
    def operate(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        deferred = list(intercepted_in((args, kwargs), _Deferred))
        # the module is being built: a mode below this one notes the operation down
        if any(tensor._maker is not None and tensor._maker.active for tensor in deferred):
            with as_they_are():
                return func(*args, **kwargs)
        if func in GRADIENTS:
            # (optimizers, and what moves a whole module, look at all gradients and pass over none)
            if args[0]._trained_elsewhere and not _reads_all(sys._getframe(2)):
                raise _elsewhere(args[0], "The gradient of ")
            with as_they_are():
                return func(*args, **kwargs)
        if func in SEEMING:
            return SEEMING[func](torch.device("cpu"))
        if func in MOVES:
            return _moved(func, args, kwargs)
        if func not in NUMBERS:
            try:
                with as_they_are(), _OnlyLooks():  # type: ignore[no-untyped-call]
                    result = func(*args, **kwargs)
            except _Computes:
                pass
            else:
                with as_they_are():
                    return _same_memory(result, deferred)
        return _compute(func, args, kwargs, deferred)

    def numbers(self) -> Tensor:
        if self._maker is None:
            raise _elsewhere(self)
        with as_they_are():
            return self._maker.numbers([self])[0]  # type: ignore[list-item]

    def __reduce_ex__(self, protocol: Any) -> Any:
        pickled = self._maker and self._maker.pickled(self)  # type: ignore[arg-type]
        return pickled or super().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        with as_they_are():
            size = tuple(self.shape)  # type: ignore[attr-defined]
        return f"<{self._full_name or 'a tensor'} of size {size}, {self._where or 'not made yet'}>"


class DeferredTensor(_Deferred, Tensor):  # type: ignore[misc]
    """A buffer without memory on this rank, or a tensor in the memory of a deferred one."""


class DeferredParameter(_Deferred, nn.Parameter):  # type: ignore[misc]
    """A parameter."""


def _reads_all(frame: FrameType) -> bool:
    place, caller = _place(frame), frame.f_back
    if place == "torch.nn.modules.module" and caller is not None:
        if frame.f_code.co_name == "zero_grad":  # Lightning's, as a fit begins
            return _place(caller).startswith(("lightning.", "pytorch_lightning."))
        return True
    return place.startswith("torch.optim")


def _place(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor has no memory on this rank."""
    return isinstance(tensor, _Deferred)


def is_offloaded(tensor: Any) -> bool:
    """Whether another rank has made a tensor, and this one has not."""
    return isinstance(tensor, _Deferred) and tensor._maker is None


def is_of_one_rank(tensor: Any) -> bool:
    """Whether a tensor was made in ``configure_model`` for one rank alone, here or elsewhere."""
    if isinstance(tensor, _Deferred):
        return tensor._maker is None or tensor._maker.on_one_rank
    return "_was_deferred" in vars(tensor)


# ---------------------------------------------------------------- making


def materialize(tensors: Iterable[Tensor]) -> None:
    """Give tensors their memory and numbers, for good; made ones stay as they are.

    Raises:
        DeferredError: another rank has one.
    """
    for tensor in tensors:
        if isinstance(tensor, _Deferred):
            if tensor._maker is None:
                raise _elsewhere(tensor)
            with as_they_are():
                tensor._maker.make(tensor)


@contextlib.contextmanager
def materialized(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, tensors have their memory and numbers; changes of them are lost."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors:
            if isinstance(tensor, _Deferred):
                stack.enter_context(materialized_with(tensor, tensor.numbers()))
        yield


@contextlib.contextmanager
def materialized_with(tensor: Any, value: Tensor) -> Iterator[None]:
    """Inside, a deferred tensor has the memory of ``value``."""
    before = show(tensor, value)
    try:
        yield
    finally:
        restore(tensor, before)


def materialize_here(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Give tensors their memory here, whoever had them before.

    Returns:
        Those whose numbers are on another rank and must still come.
    """
    missing = []
    for tensor in tensors:
        if is_offloaded(tensor):
            missing.append(tensor)
            with as_they_are():
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            show(tensor, empty)
        else:
            materialize([tensor])
    return missing


def value_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor: its own, or those that it would have, in memory of their own."""
    return tensor.numbers() if isinstance(tensor, _Deferred) else tensor.detach()


def offload(tensor: Any, name: str, where: str) -> None:
    """Free a tensor's memory: another rank owns it from here on.

    Args:
        tensor: a parameter or buffer.
        name: in the LightningModule.
        where: says which rank has it.
    """
    with as_they_are():
        if not isinstance(tensor, _Deferred):
            # on the meta device sizes, strides and types can still be asked for, at no cost
            swap_memory(tensor, ordinary(tensor, like(tensor, "meta")))
        defer(tensor, None, name, where)


def like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A new tensor with the size and strides of another one, with no numbers in it."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


_ATTRIBUTES = ("_maker", "_full_name", "_where", "_was_deferred", "_trained_elsewhere")


class Before(NamedTuple):
    """What a tensor was before it got other memory.

    Attributes:
        memory: a tensor that has its memory for so long.
        kind: its class.
        attributes: what it carried because it was deferred.
    """

    memory: Tensor
    kind: type
    attributes: dict[str, Any]


def exchange(tensor: Any, other: Tensor) -> Before:
    """Give a tensor the memory of another one; it stays the same object, with its own class."""
    attributes = {name: vars(tensor)[name] for name in _ATTRIBUTES if name in vars(tensor)}
    with as_they_are():
        swap_memory(tensor, other)
    clear_attributes(tensor)
    return Before(other, type(tensor), attributes)


def clear_attributes(tensor: Any) -> None:
    """Take away what a tensor carries because it is deferred, or was."""
    for name in _ATTRIBUTES:
        vars(tensor).pop(name, None)


def defer(tensor: Any, maker: Maker | None, name: str, where: str) -> None:
    """Make a deferred tensor of one that has no memory; it stays the same object."""
    tensor.__class__ = DeferredParameter if isinstance(tensor, nn.Parameter) else DeferredTensor
    tensor._maker, tensor._full_name, tensor._where = maker, name, where


def _elsewhere(tensor: Any, what: str = "") -> DeferredError:
    if not tensor._where.startswith("on "):
        return DeferredError(
            f"{what}{tensor._full_name!r} is {tensor._where}. Load a checkpoint into the module."
        )
    return DeferredError(
        f"{what}{tensor._full_name!r} is {tensor._where}: a network that is made in "
        "configure_model is whole on no rank. trainer.save_checkpoint() and "
        "strategy.full_state_dict() gather all weights; a network that fits on every rank can be "
        "made in __init__, and is whole there after fit."
    )


def show(tensor: Any, value: Tensor) -> Before:
    """Make an ordinary tensor of one, deferred or not, with this memory."""
    before = exchange(tensor, ordinary(tensor, value))
    with as_they_are():
        tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor
        # a tensor with memory is still one that other ranks lack, and `is_of_one_rank` has to tell
        tensor._was_deferred = True
    return before


def restore(tensor: Any, before: Before) -> None:
    """Undo :func:`exchange`, and what has come after it (:func:`show`, :func:`defer`)."""
    with as_they_are():
        swap_memory(tensor, before.memory)
        tensor.__class__ = before.kind
        clear_attributes(tensor)
        vars(tensor).update(before.attributes)


# ---------------------------------------------------------------- operations on deferred tensors


class _Computes(BaseException):
    """Raised by `_OnlyLooks` where an operation needs numbers or writes to a tensor."""


class _OnlyLooks(TorchDispatchMode):
    """Runs operations that only make views of deferred tensors; others raise `_Computes`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        described = schema(func)
        aliases = [returned.alias_info for returned in described.returns]
        views = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        # a view that autograd knows of must show real memory, which its gradient belongs to
        tracked = torch.is_grad_enabled() and described.name != "aten::detach"
        with as_they_are():
            wanted = tracked and any(t.requires_grad for _, t in tensors_in((args, kwargs)))
        if not views or wanted:
            raise _Computes
        return func(*args, **(kwargs or {}))


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], deferred: list[Any]) -> Any:
    with as_they_are():
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in deferred)
    # autograd will hold this very tensor, so it has memory for good
    if trains:
        materialize(deferred)
        return func(*args, **kwargs)
    for tensor in deferred:
        if tensor._maker is None:
            raise _elsewhere(tensor)
    with as_they_are():
        values = list(deferred[0]._maker.numbers(deferred))
        versions = [version(value) for value in values]
        of = {id(tensor): value for tensor, value in zip(deferred, values)}
        back = {id(value): tensor for tensor, value in zip(deferred, values)}
        # the operation runs on the numbers; where it returns one, its tensor takes the place again
        args, kwargs = rebuild((args, kwargs), lambda v: of.get(id(v), v))
    result = func(*args, **kwargs)
    with as_they_are():
        for tensor, value, before in zip(deferred, values, versions):
            if version(value) != before and is_deferred(tensor):
                tensor._maker.settle(tensor, value)
    if any(id(tensor) in back for _, tensor in tensors_in(result)):
        return rebuild(result, lambda v: back.get(id(v), v))
    return result


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``to``, ``cpu``, ``cuda`` give the tensor itself: it has no memory on any device yet."""
    tensor = args[0]
    with as_they_are():
        dtype = tensor.dtype
    if func is Tensor.to and torch.empty(0, dtype=dtype).to(*args[1:], **kwargs).dtype != dtype:
        return _compute(func, args, kwargs, [tensor])
    return tensor


def _same_memory(result: Any, deferred: list[Any]) -> Any:
    """Make tensors of a result deferred that show the memory of a deferred one, in place."""
    for _, tensor in tensors_in(result):
        if type(tensor) is Tensor and tensor.is_meta:
            key = storage_key(tensor.untyped_storage())
            source = next(
                (t for t in deferred if storage_key(t.untyped_storage()) == key), deferred[0]
            )
            if source._maker is None:
                defer(tensor, None, source._full_name, source._where)
            else:
                source._maker.open(tensor, source._full_name)
    return result


SEEMING: Mapping[Any, Callable[[torch.device], Any]] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
"""Answers about the place of a tensor that has no memory."""

NUMBERS = {
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.item, Tensor.data_ptr, Tensor.__format__,
    Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
}  # fmt: skip
"""Methods that look past torch's operations at the memory itself."""

MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}

GRADIENTS = {
    *getters("grad"),
    *(getattr(Tensor.grad, name) for name in ("__set__", "__delete__")),
}

_Deferred.looks = LOOKS | {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}


def is_vacant(tensor: Any) -> bool:
    """Whether a tensor has given its memory back."""
    with as_they_are():
        if is_deferred(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return False
        return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def vacate(tensor: Tensor) -> None:
    """Give a tensor's memory back, unless something else shows it, or a graph refers to it.

    What is not contiguous keeps it: TorchDynamo cannot look at such a tensor without memory.
    """
    with torch.no_grad(), as_they_are():
        if is_deferred(tensor) or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return
        if is_vacant(tensor) or is_shared(tensor) or is_held(tensor) or tensor.is_inference():
            return
        empty = torch.empty_like(tensor)
        # (`data` below keeps the object, which modules, optimizers and the user's code hold)
        empty.untyped_storage().resize_(0)
        tensor.data = empty


def occupy(tensor: Tensor, device: torch.device | None = None) -> None:
    """Give a vacant tensor memory again, with no numbers in it.

    Args:
        tensor: a tensor.
        device: where; ``None``: where it was.
    """
    if is_vacant(tensor):
        with torch.no_grad(), as_they_are():
            contiguous = torch.contiguous_format
            tensor.data = torch.empty_like(tensor, device=device, memory_format=contiguous)


_LOST = "not here: its rank has failed, or could not hand it over"


def give_up(tensor: Tensor, name: str) -> None:
    """Nobody will bring the numbers of a vacant tensor: from now on reading it is an error."""
    if is_vacant(tensor):
        offload(tensor, name, _LOST)


def take_again(tensors: Iterable[Tensor], *, empty: bool) -> None:
    """Before another run: have memory for what :func:`give_up` has left without numbers.

    Args:
        tensors: any.
        empty: whether the numbers come from another rank.

    Raises:
        DeferredError: they do not.
    """
    for tensor in tensors:
        if isinstance(tensor, _Deferred) and tensor._where == _LOST:
            if not empty:
                raise _elsewhere(tensor)
            materialize_here([tensor])
            clear_attributes(tensor)
