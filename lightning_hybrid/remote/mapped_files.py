"""Finds out which tensors lie in the memory of a mapped file, whose pages are read when needed."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

LARGE_BYTES = 2**20
"""Smaller tensors are not worth to be left in their file."""

_HELD_IN_MEMORY = ("/dev/", "/memfd:", "/SYSV")


def mappings() -> Iterator[tuple[int, int, str]]:
    """The first address of each mapped file of this process, the one behind its last, its path.

    None on systems other than Linux.
    """
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            if path.startswith("/") and not path.startswith(_HELD_IN_MEMORY):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                yield begin, end, path


def in_mapped_file(tensor: Tensor) -> bool:
    """Whether a large tensor lies in the memory of a mapped file."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    if min(tensor.nbytes, storage.nbytes()) <= LARGE_BYTES:
        return False
    address = storage.data_ptr()
    return any(begin <= address < end for begin, end, _ in mappings())
