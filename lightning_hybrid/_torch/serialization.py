"""`torch.save` of tensors whose memory is made only when it is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import as_they_are


class _ReadWhenWritten(torch.UntypedStorage):
    """A storage that is read when `torch.save` writes it.

    (`torch.save` calls ``cpu`` of storages on other devices one by one, as it writes them.)
    """

    read: Callable[[], torch.UntypedStorage]

    def cpu(self) -> torch.UntypedStorage:
        return self.read()


def reduced(tensor: Tensor, read: Callable[[], torch.UntypedStorage]) -> Any:
    """A result for ``__reduce_ex__`` of a tensor without memory, so that `torch.save` reads it.

    It is that of a tensor on the CPU, and good for `torch.save` alone.

    Args:
        tensor: has the size, stride, offset and type, and no memory.
        read: returns the whole storage.
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
