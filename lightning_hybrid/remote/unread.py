"""Tensors whose numbers are in a file and have no memory here, where not all of them have room.

Where the address space of a process is limited, mapping a whole file may be refused, and a part of
it is not. So these tensors are deferred (:mod:`lightning_hybrid.remote.deferred`): each one is
mapped while it is read, and for good when it is written to or enters a graph.
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
    Before,
    Maker,
    defer,
    exchange,
    is_deferred,
    like,
    restore,
)
from lightning_hybrid.remote.deferred import show as make_ordinary
from lightning_hybrid.remote.intercepted import ordinary

_streams: ContextVar[bool] = ContextVar("streams", default=False)


class Unread(Maker):
    """Knows where the numbers of one tensor, and of its views, are.

    Args:
        read: gives them, as one piece of memory: 1-d, of bytes; changes of it are this rank's.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read
        self.whole: tuple[object, ...] = ()  # see `place_of`
        self._shown: list[ref[Any]] = []

    def numbers(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Of deferred tensors, each from its file."""
        made: dict[int, Tensor] = {}
        found = []
        for tensor in tensors:
            maker: Any = tensor._maker  # type: ignore[attr-defined]
            # an operation may be given tensors of a network that is being built, too
            if not isinstance(maker, Unread):
                found += maker.numbers([tensor])
                continue
            # a module that is being built notes down what is done, which this is no part of
            with without_dispatch_modes():
                if id(maker) not in made:
                    made[id(maker)] = maker._read()
                found.append(_laid_out(tensor, made[id(maker)]))
        return found

    def settle(self, tensor: Tensor, value: Tensor) -> None:
        # each of these is ordinary from here on, and shows the same new memory
        shown, self._shown = self._shown, []
        memory = torch.empty(0, dtype=torch.uint8)
        with as_they_are():
            memory.set_(value.untyped_storage())
        for reference in shown:
            other: Any = reference()
            if is_deferred(other) and other._maker is self:
                _become(other, _laid_out(other, memory))

    def open(self, tensor: Any, name: str) -> None:
        defer(tensor, self, name, "in a file, of which there is no room to map all")
        self._shown.append(ref(tensor))

    def pickled(self, tensor: Tensor) -> Any:
        """Inside of :func:`streaming`: of a tensor that is read when it is written."""
        if not _streams.get() or isinstance(tensor, nn.Parameter):
            return None
        return reduced(tensor, lambda: self._read().untyped_storage())


def _laid_out(tensor: Tensor, memory: Tensor) -> Tensor:
    with as_they_are():
        size, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return empty.set_(memory.untyped_storage(), offset, size, stride)


def _become(tensor: Any, value: Tensor) -> None:
    before = make_ordinary(tensor, value).memory
    vars(tensor).pop("_was_deferred", None)  # all ranks have it
    with as_they_are():
        gradient = before.grad
    if gradient is not None:
        if is_deferred(gradient):
            gradient._maker.make(gradient)  # type: ignore[attr-defined]
        tensor.grad = gradient


def is_unread(tensor: Any) -> bool:
    """Whether a tensor is in a file, and has no memory here."""
    return is_deferred(tensor) and isinstance(tensor._maker, Unread)


def unread(
    size: Any, stride: Any, dtype: torch.dtype, read: Callable[[], Tensor], place: object = None
) -> Tensor:
    """A tensor whose numbers are in a file, or on another rank.

    Args:
        size: of it.
        stride: of it.
        dtype: of it.
        read: see :class:`Unread`.
        place: for :func:`place_of`.
    """
    tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    maker = Unread(read)
    maker.whole = (place, *_form(tensor))
    maker.open(tensor, "")
    return tensor


def place_of(tensor: Any) -> Any:
    """What :func:`unread` was told of a tensor; ``None`` for a view that shows it otherwise."""
    if not is_unread(tensor):
        return None
    place, *form = tensor._maker.whole or (None,)
    with as_they_are():
        return place if form == [*_form(tensor)] else None


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def leave_unread(tensor: Any, name: str, value: Any) -> None:
    """Free the memory of a tensor; its numbers are those of an unread one."""
    _leave(tensor, name, value)


@contextmanager
def left_unread(tensor: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the numbers of a tensor are those of an unread one, and it has no memory."""
    before = _leave(tensor, name, value)
    try:
        yield
    finally:
        restore(tensor, before)


def _leave(tensor: Any, name: str, value: Any) -> Before:
    with as_they_are(), torch.no_grad():
        before = exchange(tensor, ordinary(tensor, like(value, "meta")))
        value._maker.open(tensor, name)
    return before


@contextmanager
def streaming() -> Iterator[None]:
    """Inside, `torch.save` reads each unread tensor when it writes it, and keeps none."""
    token = _streams.set(True)
    try:
        yield
    finally:
        _streams.reset(token)
