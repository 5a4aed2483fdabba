"""`torch.save` of tensors whose memory is made only when it is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are


class _ReadWhenWritten(torch.UntypedStorage):
    """`torch.save` brings storages of other devices to the CPU one by one, as it writes them."""

    read: Callable[[], torch.UntypedStorage]

    def cpu(self) -> torch.UntypedStorage:
        return self.read()


def reduced(tensor: Tensor, read: Callable[[], torch.UntypedStorage]) -> Any:
    """What ``__reduce_ex__`` of a tensor on the CPU gives, for `torch.save` alone.

    Args:
        tensor: its size, stride, offset and type; it has no memory.
        read: gives the memory, all of the storage.
    """
    with as_they_are():
        nbytes = tensor.untyped_storage().nbytes()
        size, stride = tuple(tensor.shape), tensor.stride()
        offset, dtype = tensor.storage_offset(), tensor.dtype
    storage = _ReadWhenWritten(nbytes, device="meta")  # type: ignore[no-untyped-call]
    storage.read = read
    rebuild, (typed, _, _, _, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    # what `torch.save` writes as the place that a storage was at; it asks fake tensors likewise
    typed._fake_device = torch.device("cpu")
    return rebuild, (typed, offset, size, stride, *rest)
