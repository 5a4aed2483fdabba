"""Memory that goes back to the system as soon as it is dropped.

C's allocator returns only memory at the end of its heap to the system. In the hole that a freed
tensor leaves it possibly finds no room for the next tensor of that size (glibc before 2.38). So
weights that come and go, between small objects that are kept, would leave holes that stay in the
process.
"""

import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 2**20
"""From this size on, each piece of memory is a mapping of its own."""


def memory_for(size: int, device: torch.device) -> torch.UntypedStorage:
    """Make an uninitialised storage; on CPUs a large one is a mapping of its own.

    Args:
        size: its size in bytes.
        device: its device.
    """
    if device.type != "cpu" or size < _LEAST_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.UntypedStorage(size, device=device)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()


def with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Make an uninitialised tensor of the size, type and strides of another one.

    Args:
        tensor: the other one, which may be on the meta device.
        device: the device of the new one; on CPUs its memory is that of :func:`memory_for`.
    """
    storage = memory_for(tensor.untyped_storage().nbytes(), device)
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    return made.set_(storage, 0, tensor.shape, tensor.stride())
