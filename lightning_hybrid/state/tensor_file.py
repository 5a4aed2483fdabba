"""Tensors in a file without a name, from which other processes of the host map what they read.

At the end of a run every rank keeps what it owns, and the script goes on on all of them. It may
read any weight there, at any time, and change it, as if each rank had a module of its own.
So a rank writes what it owns to a file that has no name, and the others map it: until they read a
number it takes no memory, then as much as the system has to spare (it may drop those pages again,
as it does with every file), and what they write is theirs alone. A file lives as long as any
process has it; a kill leaves nothing on the disk.

A checkpoint for a process whose address space has no room for it: read tensor by tensor.

Torch reads a storage, it is written to a file without a name and forgotten, and the tensor is read
from there when it is needed (:mod:`lightning_hybrid.remote.unread`). So what is in memory at once
is the largest tensor.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch import Tensor

from lightning_hybrid._torch.tensors import storage_key
from lightning_hybrid._trees import Token, rebuild, tensors_in
from lightning_hybrid.comm import TensorSpec, bytes_of
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import free_addresses, gigabytes
from lightning_hybrid.remote import Unread, unread

PIECE_BYTES = 64 * 2**20
"""The most that is copied at once."""
_TOKEN_BYTES = _ALIGNED = 64


class NoAddresses(HybridError):
    """The address space of this process is limited (``ulimit -v``), and has no room for so much."""


@dataclass(frozen=True)
class _Stored(Token):
    """In the place of a tensor: where it is in the file.

    Attributes:
        offset: of its first byte.
        spec: how it lies there.
    """

    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class Ticket:
    """By what other processes of the host find a file.

    Attributes:
        path: of the file, while its writer has it open.
        token: its first bytes; on another host the path may lead to another file.
        value: what was written, places in the file in the stead of dense tensors.
    """

    path: str
    token: bytes
    value: Any


class TensorFile:
    """A file of tensors, being written.

    Args:
        folder: where; the system's temporary one if nothing can be written there.
    """

    def __init__(self, folder: str) -> None:
        writable = Path(folder).is_dir() and os.access(folder, os.W_OK)
        self._file = TemporaryFile(dir=folder if writable else None)  # noqa: SIM115  others open it
        self._kept = _Kept(self._file)
        # by the time the path is opened its process number may be that of another host or process
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file.write(self._token)

    def write(self, value: Any) -> Ticket:
        """Write the dense tensors in nested containers.

        Raises:
            OSError: there is no room for them.
        """
        return self.ticket(rebuild(value, lambda p: self._write(p) if _is_dense(p) else p))

    def store(self, spec: TensorSpec, pieces: Iterable[Tensor]) -> Token:
        """Write a tensor that comes in pieces. Returns what stands in its place.

        Args:
            spec: of the tensor.
            pieces: its bytes, on the CPU.

        Raises:
            OSError: there is no room for it.
        """
        offset = self._file.seek(-self._file.tell() % _ALIGNED, os.SEEK_CUR)
        for piece in pieces:
            self._file.write(piece.numpy().data)
        return _Stored(offset, spec)

    def ticket(self, packed: Any) -> Ticket:
        """For other processes, and this one.

        Args:
            packed: nested containers, with what :meth:`store` has returned.
        """
        self._file.flush()
        # a file without a name can be opened by the descriptor of a process that has it
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return Ticket(path, self._token, packed)

    def keep(self, memory: Tensor) -> Callable[[], Tensor]:
        """Write bytes that this process reads again. Returns what maps them."""
        begin = self._file.seek(-self._file.tell() % _ALIGNED, os.SEEK_CUR)
        for piece in memory.split(PIECE_BYTES):
            self._file.write(piece.numpy().data)
        self._file.flush()
        kept, nbytes = self._kept, memory.numel()
        return lambda: bytes_in(kept.file, begin, nbytes)

    def close(self) -> None:
        """Close the file; all processes that read it have opened it by now."""
        self._file.close()

    def _write(self, tensor: Tensor) -> Token:
        spec = TensorSpec.of(tensor, gradient=False)
        memory = bytes_of(spec.laid_out(tensor))
        return self.store(spec, (piece.cpu() for piece in memory.split(PIECE_BYTES)))


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def read_files(tickets: Iterable[Ticket]) -> list[Any] | None:
    """What was written, in memory that is the files; changes of it are this process's alone.

    Where so much must not be mapped, tensors are mapped one by one, when they are read.

    Returns:
        ``None`` where one cannot be read: it is on another host.
    """
    read = [_read(ticket) for ticket in tickets]
    return None if None in read else read


def _read(ticket: Ticket) -> Any | None:
    try:
        file = Path(ticket.path).open("rb")  # noqa: SIM115  unread tensors keep it
    except (FileNotFoundError, PermissionError):
        return None
    if file.read(_TOKEN_BYTES) != ticket.token:
        file.close()
        return None
    # where addresses are short one file at once would leave too few to compute with
    if not may_be_mapped(file):
        return rebuild(ticket.value, _unread_from(file))
    memory = _map(file)
    file.close()
    return rebuild(ticket.value, _mapped_from(memory))


def may_be_mapped(file: BinaryIO) -> bool:
    """Whether all of a file may be: what computes afterwards needs as many addresses."""
    left = free_addresses()
    return left is None or 2 * os.fstat(file.fileno()).st_size <= left


def _map(file: BinaryIO, begin: int = 0, size: int = 0) -> mmap.mmap:
    """A part of a file, by default all of it; the memory begins at the page in which it begins."""
    before = begin % mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(
            file.fileno(),
            size and size + before,
            access=mmap.ACCESS_COPY,
            offset=begin - before,
        )
    except OSError as error:
        size = size or os.fstat(file.fileno()).st_size
        raise NoAddresses(
            f"{gigabytes(size)} that another rank owns cannot be mapped here ({error.strerror}): "
            f"the address space of this process is limited, and {_left()} of it is left. "
            "trainer.save_checkpoint(...) needs room for one tensor at a time; a parameter or a "
            "state that is read alone likewise. For all at once raise `ulimit -v`, or take less "
            "of it (MALLOC_ARENA_MAX=2 MALLOC_MMAP_THRESHOLD_=1000000)."
        ) from error
    _mapped[_address(memory)] = memory
    return memory


def _left() -> str:
    left = free_addresses()
    return "an unknown part" if left is None else gigabytes(left)


_mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""By the address of the first byte."""
_PAGE_OUT = 21  # MADV_PAGEOUT of Linux, which Python has no name for


def _address(memory: Any) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def let_go(part: memoryview) -> None:
    """Give memory back that was mapped, and that is not needed for the moment.

    Where it is read again it is what it was, changes included.

    Args:
        part: any memory; nothing happens if it was not mapped here.
    """
    if not part.nbytes:
        return
    first = _address(part)
    for start, memory in _mapped.items():
        if start <= first < start + len(memory):
            # the system takes whole pages; what else is on the first one is read again where needed
            begin = (first - start) // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):  # not every system can
                memory.madvise(_PAGE_OUT, begin, first - start + part.nbytes - begin)


_checkpoints: set[str] = set()
"""Paths of those that torch has mapped."""


def remember_mapped(path: str | Path) -> None:
    """A checkpoint was mapped."""
    _checkpoints.add(str(Path(path).resolve()))


def let_go_of_checkpoints() -> None:
    """Give back the memory of all pages of mapped checkpoints.

    What a rank has read to send it, or to copy it to its weights, it does not read again, and a
    page of a file that was read stays in memory until the system needs it for something else.
    Where a number is read again it is what it was, changes included.
    """
    if not _checkpoints:
        return
    with suppress(OSError, AttributeError):  # other systems than Linux, and old ones
        madvise = ctypes.CDLL(None).madvise
        # torch keeps its mappings to itself; the system knows them all
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, *_, path = line.split(maxsplit=5)
            if path in _checkpoints:
                begin, end = (int(address, 16) for address in addresses.split("-"))
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGE_OUT)


class _Kept:
    """A file that is closed when no unread tensor needs it any more."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        finalize(self, file.close)


def _unread_from(file: BinaryIO) -> Callable[[Any], Any]:
    kept = _Kept(file)

    def unread_one(part: Any) -> Any:
        if not isinstance(part, _Stored):
            return part
        spec = part.spec
        nbytes = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        stride = spec.strides or torch.empty(spec.shape, device="meta").stride()
        return unread(
            spec.shape, stride, spec.dtype, lambda: bytes_in(kept.file, part.offset, nbytes)
        )

    return unread_one


def bytes_in(file: BinaryIO, begin: int, nbytes: int) -> Tensor:
    """Bytes of a file, mapped.

    Raises:
        NoAddresses: there is no room for so many.
    """
    memory = _map(file, begin, nbytes)
    before = len(memory) - nbytes
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=before)


def _mapped_from(memory: mmap.mmap) -> Callable[[Any], Any]:
    def mapped(part: Any) -> Any:
        if not isinstance(part, _Stored):
            return part
        spec = part.spec
        count = torch.Size(spec.shape).numel()
        flat = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=part.offset)
        if spec.strides is None:
            return flat.view(spec.shape)
        return flat.as_strided(spec.shape, spec.strides)

    return mapped


_SMALL_BYTES = 2**16
"""A storage of at most this is read at once."""


def load_unread(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint, its large tensors unread.

    Args:
        path: of the file.
        weights_only: as in `torch.load`.

    Raises:
        NoAddresses: something other than containers has tensors that are large.
    """
    file = TensorFile(str(Path(path).parent))
    kept: dict[int, tuple[torch.UntypedStorage, Unread]] = {}

    def keep(storage: Any, _: str) -> Any:
        if storage.nbytes() <= _SMALL_BYTES:
            return storage
        # torch hands over each storage as it is read: the file has its numbers from now on
        empty = torch.UntypedStorage(storage.nbytes(), device="meta")
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        kept[storage_key(empty)] = empty, Unread(file.keep(memory))
        return empty

    loaded: dict[str, Any] = torch.load(path, map_location=keep, weights_only=weights_only)
    left = set(kept)
    for steps, tensor in tensors_in(loaded):
        key = storage_key(tensor.untyped_storage()) if tensor.is_meta else None
        if key in kept:
            kept[key][1].open(tensor, ".".join(str(name) for _, name in steps))
            left.discard(key)
    if left:
        raise NoAddresses(
            f"The checkpoint {str(path)!r} has {len(left)} large tensors in objects that are no "
            "containers, and the address space of this process has no room to map all of it. "
            "Raise `ulimit -v`."
        )
    return loaded
