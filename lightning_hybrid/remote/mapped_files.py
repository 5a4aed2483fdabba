"""Tensors in the memory of a mapped file, whose pages are read when needed.

Another process that has the same file reads such a tensor there itself (:class:`FilePart`).
"""

import ctypes
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 2**20
"""Smaller tensors are not worth to be left in their file."""

_PIECE_BYTES = 64 * 2**20
"""Most bytes that are read at once for another device."""

PAGE_OUT = 21
"""MADV_PAGEOUT of Linux, which Python has no name for."""

_HELD_IN_MEMORY = ("/dev/", "/memfd:", "/SYSV")


def mappings() -> Iterator[tuple[int, int, str]]:
    """Yield the mapped files of this process: first address, address behind the last one, path.

    On other systems than Linux there are none.
    """
    return ((begin, end, path) for begin, end, _, _, path in _mappings())


def _mappings() -> Iterator[tuple[int, int, int, int, str]]:
    """Yield those of :func:`mappings` with the place in the file and its inode before the path."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith("/") and not path[0].startswith(_HELD_IN_MEMORY):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                yield begin, end, int(offset, 16), int(inode), path[0]


def in_mapped_file(tensor: Tensor) -> bool:
    """Whether a tensor is larger than `LARGE_BYTES`, and in the memory of a mapped file."""
    if not _is_large(tensor):
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(begin <= address < end for begin, end, _ in mappings())


def _is_large(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) > LARGE_BYTES


def let_go_of_pages(begin: int, end: int) -> None:
    """Let the system take back the pages of mapped files between two addresses.

    A page of a file that was read stays in memory until the system needs it for something else.
    When it is read again it has the same contents, changes included.
    """
    with suppress(OSError, AttributeError):  # other systems than Linux, and old ones
        size = ctypes.c_size_t(end - begin)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, PAGE_OUT)


@dataclass(frozen=True)
class FileOfTensors:
    """A file as it is now, to be found by another process, perhaps on another host.

    Attributes:
        path: its path.
        inode: number of the file in its file system.
        nbytes: its size.
        written_ns: when it was written last.
    """

    path: str
    inode: int
    nbytes: int
    written_ns: int

    @classmethod
    def at(cls, path: str) -> "FileOfTensors | None":
        """Return the file at a path; ``None``: there is none that this process may read."""
        try:
            found = Path(path).stat()
        except OSError:
            return None
        if not (stat.S_ISREG(found.st_mode) and os.access(path, os.R_OK)):
            return None
        return cls(path, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class FilePart:
    """Where in a file the numbers of a tensor are, in their order in the tensor.

    Attributes:
        file: the file.
        begin: place of the first byte.
    """

    file: FileOfTensors
    begin: int

    def read_into(self, tensor: Tensor) -> None:
        """Read the numbers into the memory of a contiguous tensor, which is on any device.

        Raises:
            OSError: the file cannot be read to its end.
        """
        memory = tensor.detach().view(-1).view(torch.uint8)
        with Path(self.file.path).open("rb", buffering=0) as opened:
            opened.seek(self.begin)
            for piece in memory.split(_PIECE_BYTES):
                on_cpu = piece.device.type == "cpu"
                here = piece if on_cpu else torch.empty_like(piece, device="cpu")
                _fill(opened, here.numpy().data)
                if not on_cpu:
                    piece.copy_(here)


def _fill(file: RawIOBase, memory: memoryview) -> None:
    while memory:
        count = file.readinto(memory)
        if not count:
            raise OSError(f"a file of weights has become shorter while it was read: {file!r}")
        memory = memory[count:]


class MappedFiles:
    """The files that this process has mapped when this object is made."""

    def __init__(self) -> None:
        self._mappings = [*_mappings()]
        self._files: dict[str, FileOfTensors | None] = {}

    def part_of(self, tensor: Tensor) -> FilePart | None:
        """Return where in a file the numbers of a large contiguous tensor are.

        ``None``: they are in no file, or no longer as they are in the file.
        """
        if not (_is_large(tensor) and tensor.is_contiguous()):
            return None
        address = tensor.data_ptr()
        for begin, end, offset, inode, path in self._mappings:
            if begin <= address and address + tensor.nbytes <= end:
                file = self._file(path)
                # (another file may have taken the place of the one that is mapped)
                same = file is not None and file.inode == inode
                if file is None or not same or not _is_as_in_file(address, tensor.nbytes):
                    return None
                return FilePart(file, offset + address - begin)
        return None

    def _file(self, path: str) -> FileOfTensors | None:
        if path not in self._files:
            self._files[path] = FileOfTensors.at(path)
        return self._files[path]


def let_go_of_file(tensor: Tensor) -> None:
    """If a tensor lies in a mapped file, take its pages out of this process.

    The pages stay in the system's cache of the file (unlike with :func:`let_go_of_pages`), from
    which a later read gets them at once. If a page was written to, nothing is done, since its
    contents would be lost. A tensor in other memory stays as it is.
    """
    # (that its pages are those of a file is seen below: to look for the file takes milliseconds)
    if not _is_large(tensor):
        return
    storage = tensor.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    begin, count = _pages(address, nbytes)
    with suppress(OSError, AttributeError):
        present, _, _ = _states(begin, count)
        if present.any() and _is_as_in_file(address, nbytes):
            at, size = (
                ctypes.c_void_p(begin * mmap.PAGESIZE),
                ctypes.c_size_t(count * mmap.PAGESIZE),
            )
            ctypes.CDLL(None).madvise(at, size, mmap.MADV_DONTNEED)


def _pages(address: int, nbytes: int) -> tuple[int, int]:
    """Number of the first page of some memory, and the count of its pages."""
    begin, rest = divmod(address, mmap.PAGESIZE)
    return begin, -(-(rest + nbytes) // mmap.PAGESIZE)


def _states(begin: int, count: int) -> tuple[Any, Any, Any]:
    """For each of some pages, 1 if it is in memory; if it is swapped out; if it is a file's.

    Raises:
        OSError: the system does not say it.
    """
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * begin)
        pages = np.frombuffer(file.read(8 * count), np.uint64)
    present, swapped, of_a_file = ((pages >> bit) & 1 for bit in (63, 62, 61))
    return present, swapped, of_a_file


def _is_as_in_file(address: int, nbytes: int) -> bool:
    """Whether none of the pages of a mapping of a file was written to, as far as the system tells.

    (A page that was written to is one of this process alone.)
    """
    try:
        present, swapped, of_a_file = _states(*_pages(address, nbytes))
    except OSError:
        return False
    return not (swapped | (present & ~of_a_file)).any()
