"""`torch.save` of tensors without memory, whose numbers are read when they are written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are


class _ReadWhenWritten(torch.UntypedStorage):
    """A storage without memory, whose bytes are read at the moment when `torch.save` writes it.

    `torch.save` calls ``cpu`` of each storage on another device when it is about to write it.

    Attributes:
        read: function that returns a storage with the bytes.
    """

    read: Callable[[], torch.UntypedStorage]

    def cpu(self) -> torch.UntypedStorage:
        return self.read()


def reduced(tensor: Tensor, read: Callable[[], torch.UntypedStorage]) -> Any:
    """Return what ``__reduce_ex__`` of a tensor without memory is to return, for `torch.save`.

    `torch.save` then writes it like a tensor on the CPU, and reads its numbers only at that moment.
    For pickling in other ways the result is of no use.

    Args:
        tensor: the tensor; its size, stride, offset and type count.
        read: function that returns the storage with the numbers, all of it.
    """
    with as_they_are():
        nbytes = tensor.untyped_storage().nbytes()
        size, stride = tuple(tensor.shape), tensor.stride()
        offset, dtype = tensor.storage_offset(), tensor.dtype
    storage = _ReadWhenWritten(nbytes, device="meta")  # type: ignore[no-untyped-call]
    storage.read = read
    rebuild, (typed, _, _, _, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    # the device that `torch.save` notes for a storage; it reads this attribute for fake tensors
    typed._fake_device = torch.device("cpu")
    return rebuild, (typed, offset, size, stride, *rest)
