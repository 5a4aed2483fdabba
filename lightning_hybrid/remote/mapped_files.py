"""Tensors in the memory of a mapped file, whose pages are read when needed."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 2**20
"""Smaller tensors are not worth to be left in their file."""

PAGE_OUT = 21
"""MADV_PAGEOUT of Linux, which Python has no name for."""

_HELD_IN_MEMORY = ("/dev/", "/memfd:", "/SYSV")


def mappings() -> Iterator[tuple[int, int, str]]:
    """Yield the mapped files of this process: first address, address behind the last one, path.

    On other systems than Linux there are none.
    """
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            if path.startswith("/") and not path.startswith(_HELD_IN_MEMORY):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                yield begin, end, path


def in_mapped_file(tensor: Tensor) -> bool:
    """Whether a tensor is larger than `LARGE_BYTES`, and in the memory of a mapped file."""
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
    """If a tensor lies in a mapped file, take its pages out of this process.

    The pages stay in the system's cache of the file (unlike with :func:`let_go_of_pages`), from
    which a later read gets them at once. If a page was written to, nothing is done, since its
    contents would be lost. A tensor in other memory stays as it is.
    """
    if not in_mapped_file(tensor):
        return
    storage = tensor.untyped_storage()
    begin, rest = divmod(storage.data_ptr(), mmap.PAGESIZE)
    count = -(-(rest + storage.nbytes()) // mmap.PAGESIZE)
    with suppress(OSError, AttributeError):
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(8 * begin)
            pages = np.frombuffer(file.read(8 * count), np.uint64)
        present, swapped, of_a_file = ((pages >> bit) & 1 for bit in (63, 62, 61))
        # (where the system says nothing of pages, none is present)
        if present.any() and not (swapped | (present & ~of_a_file)).any():
            at, size = (
                ctypes.c_void_p(begin * mmap.PAGESIZE),
                ctypes.c_size_t(count * mmap.PAGESIZE),
            )
            ctypes.CDLL(None).madvise(at, size, mmap.MADV_DONTNEED)
