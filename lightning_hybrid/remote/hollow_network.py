"""A network with deferred tensors, as TorchDynamo can look at it: with sizes, and no numbers.

Where a network is captured as a chain of graphs, the Python between two of them must not compute
with such tensors. Whatever it would read there is noticed.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import (
    TorchDispatchMode,
    as_they_are,
    refuse_pointer,
    storage_key,
)
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.remote.deferred import Before, is_deferred, like, restore, show


class Hollow:
    """Shows tensors that have no memory here, or wait elsewhere, as TorchDynamo can look at them.

    Inside, each such tensor is an ordinary one on ``device``, with its size and an empty storage:
    enough to capture a network. Nothing may compute with it: torch refuses indices, matrix products
    and convolutions, but many operations on CPUs do not look and read at address 0. It stays the
    same object, and looks the same each time.

    Args:
        module: whose parameters and buffers they are.
        device: where the network runs.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._kept: dict[int, tuple[Any, Tensor]] = {}
        self._shown: list[tuple[Tensor, Before]] = []
        self._needed = True

    def __enter__(self) -> None:
        if not self._needed:
            return
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            with as_they_are():
                waits = is_deferred(tensor) or tensor.device != self._device
            if waits:
                self._shown.append((tensor, show(tensor, self._empty(tensor))))
        # what has its memory here keeps it
        self._needed = bool(self._shown)

    def __exit__(self, *_: object) -> None:
        while self._shown:
            restore(*self._shown.pop())

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, the tensors have the memory that they had before."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def shown_of(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The names of the tensors that have no memory here now."""
        shown = {id(tensor) for tensor, _ in self._shown}
        return [name for name, tensor in tensors.items() if id(tensor) in shown]

    def _empty(self, tensor: Tensor) -> Tensor:
        # the same empty tensor at each call: TorchDynamo would take another one for a change
        known = self._kept.get(id(tensor))
        if known is None or known[0] is not tensor:
            with as_they_are():
                empty = like(tensor, self._device)
            if empty.is_contiguous():  # others cannot be captured without memory
                empty.untyped_storage().resize_(0)
            known = self._kept[id(tensor)] = tensor, empty
        return known[1]


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
    """Inside, note which tensors' numbers the operations need that run outside of a graph.

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
            # on CPUs many operations do not look, and would read at address 0
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
