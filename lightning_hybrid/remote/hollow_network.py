"""Lets TorchDynamo capture a network whose weights are not here, by tensors without memory.

Where a network is captured as a chain of graphs, the Python between two of them must not read
weights that are not here: :func:`watched` notices if it does.
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
    storage_key,
)
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.remote.deferred import FormerMemory, empty_like_on, is_deferred, restore, show


class Hollow:
    """A context in which TorchDynamo can capture a module with tensors that are not on its device.

    Inside, each parameter and buffer that is deferred, or on another device, is an ordinary tensor
    on ``device`` with its size and an empty storage, which is enough to capture the network.
    Nothing may compute with such a tensor: torch refuses some operations, but many on CPUs would
    read at address 0. Each parameter and buffer stays the same object, and has the same empty
    storage each time that the context is entered.

    Args:
        module: the module with these parameters and buffers.
        device: where the network runs.

    Attributes:
        needed: whether tensors are possibly not on the device. It becomes False when all are found
            there. When the network is cut, tensors go to other ranks: the caller that cuts it sets
            this to True again.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._kept: dict[int, tuple[Any, Tensor]] = {}
        self._shown: list[tuple[Tensor, FormerMemory]] = []
        self.needed = True

    def __enter__(self) -> None:
        if not self.needed:
            return
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            with as_they_are():
                waits = is_deferred(tensor) or tensor.device != self._device
            if waits:
                self._shown.append((tensor, show(tensor, self._empty(tensor))))
        self.needed = bool(self._shown)

    def __exit__(self, *_: object) -> None:
        while self._shown:
            restore(*self._shown.pop())

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, this context is left for a while: tensors are what they are outside of it."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def shown_of(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors that have an empty storage now, since this context is entered.

        Args:
            tensors: the tensors that are looked at, by name.
        """
        shown = {id(tensor) for tensor, _ in self._shown}
        return [name for name, tensor in tensors.items() if id(tensor) in shown]

    def _empty(self, tensor: Tensor) -> Tensor:
        # (the same empty tensor in each call: TorchDynamo would take another one for a change)
        known = self._kept.get(id(tensor))
        if known is None or known[0] is not tensor:
            with as_they_are():
                empty = empty_like_on(tensor, self._device)
            if empty.is_contiguous():  # (TorchDynamo cannot capture others without memory)
                empty.untyped_storage().resize_(0)
            known = self._kept[id(tensor)] = tensor, empty
        return known[1]


_NO_NUMBERS = re.compile("detach|alias|view|.*_like|new_.*")
"""Names of operations that read no numbers. (Torch refuses other views of an empty storage.)"""


class NoMemory(BaseException):
    """An operation was to read or write a tensor that is not here; the text names both.

    It is raised in the user's code, and is no ``Exception``, so that this code does not catch it.
    """


@contextmanager
def watched(
    tensors: Mapping[str, Tensor], read: set[str], absent: Collection[str] = ()
) -> Iterator[None]:
    """Inside, note in ``read`` which tensors operations outside of captured graphs read or write.

    Torch itself refuses some operations on tensors without memory, but many on CPUs would read at
    address 0. Reading sizes, making new tensors of the same size, and captures by TorchDynamo are
    allowed. (NumPy's reads are not seen.)

    Args:
        tensors: the tensors to watch, by name.
        read: the set to which names of tensors that are read or written are added.
        absent: names of the tensors among them that have no memory here, or stale numbers.

    Raises:
        NoMemory: an operation reads or writes an absent tensor.
    """
    with as_they_are():
        strided = {n: t for n, t in tensors.items() if t.layout is torch.strided}
        names = {storage_key(t.untyped_storage()): name for name, t in strided.items()}
    with _ArgumentCheck(names, read, absent) as watch, _watched_printing(watch):
        yield


class _ArgumentCheck(TorchDispatchMode):
    """A dispatch mode that checks the arguments of every operation outside of captured graphs.

    Args:
        names: by storage, the names of the watched tensors.
        read: the set to which names of tensors that are read or written are added.
        absent: names of the tensors that have no memory.
    """

    def __init__(self, names: Mapping[int, str], read: set[str], absent: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._read = read
        self._absent = absent

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell TorchDynamo to capture under this mode (it does not under other dispatch modes)."""
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
        """Note in ``read`` which watched tensors an operation reads or writes.

        Args:
            operation: name of the operation.
            tensors: its arguments.

        Raises:
            NoMemory: one of them has no memory.
        """
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            name = self._names.get(storage_key(tensor.untyped_storage()))
            if name in self._absent:
                raise NoMemory(f"{operation!r} needs the numbers of {name!r}")
            if name is not None:
                self._read.add(name)


@contextmanager
def _watched_printing(watch: _ArgumentCheck) -> Iterator[None]:
    """Inside, printing a tensor is checked too, which dispatch modes do not see."""
    original: Any = Tensor.__repr__

    def watched_repr(tensor: Tensor, **kwargs: Any) -> Any:
        watch.check("repr", [tensor])
        return original(tensor, **kwargs)

    Tensor.__repr__ = watched_repr  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.__repr__ = original  # type: ignore[method-assign]
