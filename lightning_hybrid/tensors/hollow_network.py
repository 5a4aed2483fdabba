"""A network with deferred tensors, as TorchDynamo can look at it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.tensors.deferred import attributes_of, is_deferred, restore, show


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
        self._shown: list[tuple[Any, type, dict[str, Any], Tensor]] = []
        self._needed = True

    def __enter__(self) -> None:
        if not self._needed:
            return
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            with as_they_are():
                waits = is_deferred(tensor) or tensor.device != self._device
            if waits:
                kind, before = type(tensor), attributes_of(tensor)
                self._shown.append((tensor, kind, before, show(tensor, self._empty(tensor))))
        # what has its memory here keeps it
        self._needed = bool(self._shown)

    def __exit__(self, *_: object) -> None:
        while self._shown:
            tensor, kind, before, other = self._shown.pop()
            restore(tensor, other, kind, before)

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
        shown = {id(tensor) for tensor, *_ in self._shown}
        return [name for name, tensor in tensors.items() if id(tensor) in shown]

    def _empty(self, tensor: Tensor) -> Tensor:
        known = self._kept.get(id(tensor))
        if known is None or known[0] is not tensor:
            with as_they_are():
                empty = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
                )
            if empty.is_contiguous():  # others cannot be captured without memory
                empty.untyped_storage().resize_(0)
            known = self._kept[id(tensor)] = tensor, empty
        return known[1]
