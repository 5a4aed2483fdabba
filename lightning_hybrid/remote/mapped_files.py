"""Tensors in the memory of a mapped file, whose pages are read when needed."""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path

import torch
from torch import Tensor

LARGE_BYTES = 2**20
"""Smaller tensors are not worth to be left in their file."""

PAGE_OUT = 21
"""MADV_PAGEOUT of Linux, which Python has no name for."""

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


def let_go_of_pages(begin: int, end: int) -> None:
    """Let the system take back the pages of mapped files between two addresses.

    A page of a file that was read stays in memory until the system needs it for something else.
    When it is read again it has the same contents, changes included.
    """
    with suppress(OSError, AttributeError):  # other systems than Linux, and old ones
        size = ctypes.c_size_t(end - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, PAGE_OUT)


def let_go_of_file(tensor: Tensor) -> None:
    """Let the system take back what was read of the file that a tensor lies in, if it does."""
    if in_mapped_file(tensor):
        storage = tensor.untyped_storage()
        begin = storage.data_ptr() // PAGESIZE * PAGESIZE  # (mappings begin with a page)
        let_go_of_pages(begin, storage.data_ptr() + storage.nbytes())
