"""Unread tensors: their numbers are in a file, or on another rank, and are read when needed.

Where the address space of a process is limited, it may be impossible to map a whole file, but
possible to map a part. So these tensors are deferred (:mod:`lightning_hybrid.remote.deferred`):
each one is read into temporary memory when its numbers are used, and for good when it is written to
or enters autograd's graph.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.serialization import reduced
from lightning_hybrid._torch.tensors import as_they_are, without_dispatch_modes
from lightning_hybrid.remote.deferred import (
    FormerMemory,
    Maker,
    count_as_whole,
    defer,
    empty_like_on,
    exchange_memory,
    is_deferred,
    restore,
)
from lightning_hybrid.remote.deferred import show as make_ordinary
from lightning_hybrid.remote.intercepted import ordinary

_streams: ContextVar[bool] = ContextVar("streams", default=False)


class Unread(Maker):
    """Reads one tensor, and its views, from a file or another process when they are used.

    Args:
        read: reads the numbers, as a 1-d tensor of bytes that this rank may write to.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read
        self.whole: tuple[object, ...] = ()  # see `unread_place_of`
        self._shown: list[ref[Any]] = []

    def numbers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Read the numbers of unread tensors; of other deferred tensors their makers make them.

        Args:
            tensors: deferred tensors.

        Returns:
            For each of them an ordinary tensor; for views of one memory they share memory.
        """
        made: dict[int, Tensor] = {}
        found = []
        for tensor in tensors:
            maker: Any = tensor._maker  # type: ignore[attr-defined]
            # (an operation may have tensors with other makers too)
            if not isinstance(maker, Unread):
                found += maker.numbers([tensor])
                continue
            # (while a module is built, a dispatch mode records operations, but not these)
            with without_dispatch_modes():
                if id(maker) not in made:
                    made[id(maker)] = maker._read()
                found.append(_laid_out(tensor, made[id(maker)]))
        return found

    def give_memory(self, tensor: Tensor, value: Tensor) -> None:
        # (all views become ordinary tensors in the same new memory)
        shown, self._shown = self._shown, []
        memory = torch.empty(0, dtype=torch.uint8)
        with as_they_are():
            memory.set_(value.untyped_storage())
        for reference in shown:
            other: Any = reference()
            if is_deferred(other) and other._maker is self:
                _become(other, _laid_out(other, memory))

    def open(self, tensor: Any, name: str) -> None:
        defer(tensor, self, name, "not read yet")
        self._shown.append(ref(tensor))

    def pickled(self, tensor: Tensor) -> Any:
        """Return what ``__reduce_ex__`` is to return for a tensor that is pickled.

        Inside of :func:`streaming` it has the pickler read the tensor only when it writes the
        tensor's numbers. ``None`` outside, and for parameters: they are pickled as ordinary tensors
        with their numbers.
        """
        if not _streams.get() or isinstance(tensor, nn.Parameter):
            return None
        return reduced(tensor, lambda: self._read().untyped_storage())


def _laid_out(tensor: Tensor, memory: Tensor) -> Tensor:
    """Make a tensor in ``memory`` that has the size, strides, offset and type of ``tensor``.

    Args:
        tensor: an unread tensor.
        memory: what was read for it: all bytes of its storage.
    """
    with as_they_are():
        size = tensor.shape
        stride = tensor.stride()
        offset = tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(memory.untyped_storage(), offset, size, stride)


def _become(tensor: Any, value: Tensor) -> None:
    """Turn an unread tensor into an ordinary one, in the memory of ``value``.

    It keeps its gradient, which is read too if it is deferred.
    """
    before = make_ordinary(tensor, value).memory
    count_as_whole(tensor)
    with as_they_are():
        gradient = before.grad
    if gradient is not None:
        if is_deferred(gradient):
            gradient._maker.make(gradient)  # type: ignore[attr-defined]
        tensor.grad = gradient


def is_unread(tensor: Any) -> bool:
    """Whether a tensor is an unread one."""
    return is_deferred(tensor) and isinstance(tensor._maker, Unread)


def unread(
    tensor: Tensor, read: Callable[[], Tensor], *, place: object = None, name: str = ""
) -> Tensor:
    """Turn a tensor on the meta device into an unread one; it stays the same object.

    Args:
        tensor: the tensor; it is returned.
        read: reads its numbers; see :class:`Unread`.
        place: tells where the numbers are, in any form; :func:`unread_place_of` returns it.
        name: its name in errors.
    """
    maker = Unread(read)
    maker.whole = (place, *_form(tensor))
    maker.open(tensor, name)
    return tensor


def unread_place_of(tensor: Any) -> Any:
    """Return the ``place`` that :func:`unread` was given for a tensor.

    ``None``: the tensor is not unread, is only a view of one that is, or has no place.
    """
    if not is_unread(tensor):
        return None
    place, *form = tensor._maker.whole or (None,)
    with as_they_are():
        return place if form == [*_form(tensor)] else None


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def leave_unread(tensor: Any, name: str, value: Any) -> FormerMemory:
    """Free a tensor's memory, and have it read the numbers of an unread tensor when it is used.

    Args:
        tensor: the tensor; it stays the same object, and becomes an unread tensor.
        name: its name in errors.
        value: the unread tensor whose numbers it gets, of equal size, strides and type.

    Returns:
        What :func:`restore` needs to undo it.
    """
    with as_they_are(), torch.no_grad():
        before = exchange_memory(tensor, ordinary(tensor, empty_like_on(value, "meta")))
        value._maker.open(tensor, name)
    return before


@contextmanager
def left_unread(tensor: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a tensor has no memory and reads ``value`` when used; afterwards it is as before.

    For the arguments see :func:`leave_unread`.
    """
    before = leave_unread(tensor, name, value)
    try:
        yield
    finally:
        restore(tensor, before)


@contextmanager
def streaming() -> Iterator[None]:
    """Inside, `torch.save` reads each unread tensor only when it writes it, and then drops it."""
    token = _streams.set(True)
    try:
        yield
    finally:
        _streams.reset(token)
