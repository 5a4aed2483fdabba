"""What the Python between two graphs computes with, and tensors that it must not compute with."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import (
    TorchDispatchMode,
    as_they_are,
    refuse_pointer,
    storage_key,
)
from lightning_hybrid._trees import tensors_in

_NO_NUMBERS = re.compile("detach|alias|view|.*_like|new_.*")
"""Operations that need no numbers. Torch refuses all other views of an empty storage."""


class NoMemory(BaseException):
    """A tensor without memory was to be read or written; the text says which, and by what.

    No ``Exception``: the user's code, out of which it comes, may catch those and go another way.
    """


@contextmanager
def watched(
    tensors: Mapping[str, Tensor], read: set[str], absent: Collection[str] = ()
) -> Iterator[None]:
    """Inside, notes which of these tensors an operation outside of a graph computes with.

    Args:
        tensors: by name.
        read: where their names are noted.
        absent: the names of those that have no numbers here.

    Raises:
        NoMemory: out of an operation that computes with an absent one.
    """
    with as_they_are():
        strided = {n: t for n, t in tensors.items() if t.layout is torch.strided}
        names = {storage_key(t.untyped_storage()): name for name, t in strided.items()}
    with _Watch(names, read, absent) as watch, _watched_printing(watch):
        yield


@contextmanager
def emptied(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, these tensors have no memory; an operation that would read or write one raises.

    Torch itself refuses some of them only: many operations on CPUs read at address 0. Sizes and new
    tensors of the same size are allowed, and so is TorchDynamo, which sees them as ever.

    Args:
        tensors: by the name that errors give.

    Raises:
        NoMemory: an operation needs the numbers of such a tensor, or NumPy does.
    """
    data = [(tensor, tensor.data) for tensor in tensors.values()]
    with torch.no_grad(), as_they_are():
        for tensor, _ in data:
            empty = torch.empty_like(tensor)
            empty.untyped_storage().resize_(0)
            refuse_pointer(empty)  # for NumPy, which no mode sees
            tensor.data = empty
    try:
        with watched(tensors, set(), tensors):
            yield
    except RuntimeError as error:
        if "Cannot access data pointer" not in str(error):
            raise
        raise NoMemory("one of them was asked for the address of its memory") from error
    finally:
        with torch.no_grad(), as_they_are():
            for tensor, before in data:
                tensor.data = before


class _Watch(TorchDispatchMode):
    """Looks at the arguments of every operation outside of graphs."""

    def __init__(self, names: Mapping[int, str], read: set[str], absent: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._read, self._absent = names, read, absent

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """TorchDynamo, which captures nothing under other modes, captures under this one."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket.__name__
        if not _NO_NUMBERS.fullmatch(operation):
            self.check(operation, [tensor for _, tensor in tensors_in((args, kwargs))])
        return func(*args, **kwargs)

    def check(self, operation: str, tensors: Iterable[Tensor]) -> None:
        """Note these tensors, or raise."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            name = self._names.get(storage_key(tensor.untyped_storage()))
            if name in self._absent:
                raise NoMemory(f"{operation!r} needs the numbers of {name!r}")
            if name is not None:
                self._read.add(name)


@contextmanager
def _watched_printing(watch: _Watch) -> Iterator[None]:
    """Torch prints a tensor with all modes off, so this class is changed for as long."""
    original: Any = Tensor.__repr__

    def watched_repr(tensor: Tensor, **kwargs: Any) -> Any:
        watch.check("repr", [tensor])
        return original(tensor, **kwargs)

    Tensor.__repr__ = watched_repr  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.__repr__ = original  # type: ignore[method-assign]
