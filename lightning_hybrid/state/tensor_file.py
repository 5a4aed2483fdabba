"""Tensors in a file without a name, from which other processes of the host map what they read.

At the end of a run every rank keeps what it owns, and the script continues on all of them. It may
read any weight there, at any time, and change it, as if each rank had a module of its own.
So a rank writes what it owns to a file that has no name, and the others map it: until they read a
number it takes no memory, then as much as the system has to spare (it may drop those pages again,
as it does with every file), and what they write is theirs alone. A file lives as long as any
process has it open; a kill leaves nothing on the disk.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are, is_shared
from lightning_hybrid._trees import Token, rebuild
from lightning_hybrid.comm import TensorSpec, bytes_of
from lightning_hybrid.remote import is_vacant
from lightning_hybrid.stage import tensors_of

PIECE_BYTES = 64 * 2**20
"""Most bytes that are copied at once."""
_TOKEN_BYTES = _ALIGNED = 64


@dataclass(frozen=True)
class _Stored(Token):
    """Stands in place of a tensor in a value, and says where in the file it is.

    Attributes:
        offset: the place of its first byte.
        spec: its shape, type and strides.
    """

    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class Ticket:
    """What other processes of the host need to read a file.

    Attributes:
        path: path of the file, while its writer has it open.
        token: its first bytes, to compare: on another host the path may lead to another file.
        value: the nested containers that were written, with places in the file (`_Stored`) for
            dense tensors.
    """

    path: str
    token: bytes
    value: Any


class TensorFile:
    """A file of tensors, being written.

    Args:
        folder: where to make it; the system's temporary one if nothing can be written there.
    """

    def __init__(self, folder: str) -> None:
        writable = Path(folder).is_dir() and os.access(folder, os.W_OK)
        self._file = TemporaryFile(dir=folder if writable else None)  # noqa: SIM115  others open it
        # by the time the path is opened its process number may be that of another host or process
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file.write(self._token)

    def write(self, value: Any) -> Ticket:
        """Write the dense tensors in nested containers.

        Raises:
            OSError: there is no room for them.
        """
        return self.ticket(rebuild(value, lambda p: self.put(p) if _is_dense(p) else p))

    def put(self, tensor: Tensor) -> Token:
        """Write a dense tensor that is not empty. Returns a token to put in its place.

        Raises:
            OSError: there is no room for it.
        """
        spec = TensorSpec.of(tensor, gradient=False)
        offset = self._file.seek(-self._file.tell() % _ALIGNED, os.SEEK_CUR)
        for piece in bytes_of(spec.laid_out(tensor)).split(PIECE_BYTES):
            self._file.write(piece.cpu().numpy().data)
        return _Stored(offset, spec)

    def ticket(self, packed: Any) -> Ticket:
        """The ticket by which other processes, and this one, read the file.

        Args:
            packed: nested containers, with tokens of :meth:`put` in place of tensors.
        """
        self._file.flush()
        # a file without a name can be opened by the descriptor of a process that has it
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return Ticket(path, self._token, packed)

    def close(self) -> None:
        """Close the file; all processes that read it have opened it by now."""
        self._file.close()


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def read_files(tickets: Iterable[Ticket]) -> list[Any] | None:
    """Read values that were written: their tensors map the files, and changes stay in this process.

    Returns:
        One value per ticket; ``None`` if a file cannot be read, since it is on another host, or
        since a limited address space (``ulimit -v``) has no room for it.
    """
    read = [_read(ticket) for ticket in tickets]
    return None if None in read else read


def _read(ticket: Ticket) -> Any | None:
    try:
        with Path(ticket.path).open("rb") as file:
            if file.read(_TOKEN_BYTES) != ticket.token:
                return None
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError:
        return None
    _mapped[_address(memory)] = memory
    return rebuild(ticket.value, _mapped_from(memory))


_mapped: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""The memory that was mapped here, by the address of its first byte."""
_PAGE_OUT = 21  # MADV_PAGEOUT of Linux, which Python has no name for


def _address(memory: Any) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def let_go(part: memoryview) -> None:
    """Let the system take back mapped memory that is not needed for the moment.

    When it is read again it has the same contents, changes included.

    Args:
        part: any memory; nothing happens if it was not mapped here.
    """
    if not part.nbytes:
        return
    first = _address(part)
    for start, memory in _mapped.items():
        if start <= first < start + len(memory):
            # the system takes whole pages: what else is on the first one is read again if needed
            begin = (first - start) // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):  # not every system can
                memory.madvise(_PAGE_OUT, begin, first - start + part.nbytes - begin)


_checkpoints: set[str] = set()
"""Paths of the checkpoints that torch has mapped."""


def remember_mapped(path: str | Path) -> None:
    """Note that torch has mapped a checkpoint, for :func:`let_go_of_checkpoints`."""
    _checkpoints.add(str(Path(path).resolve()))


def let_go_of_checkpoints() -> None:
    """Let the system take back all pages of mapped checkpoints.

    A rank does not read again what it has read to send it, or to copy it to its weights, but a
    page of a file that was read stays in memory until the system needs it for something else.
    When a page is read again it has the same contents, changes included.
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


class FilesOfWorker:
    """Writes tensors of a worker to a file for other ranks, and maps the files of others.

    Args:
        module: the LightningModule of this rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._file: TensorFile | None = None

    def write(self, value: Any, folder: str) -> Ticket | None:
        """Write tensors to a file that is kept until the next call; ``None``: there is no room."""
        self.close()
        with suppress(OSError):
            self._file = TensorFile(folder)
            return self._file.write(value)
        return None

    def read(self, tickets: Sequence[Ticket], owned: Collection[str]) -> bool:
        """Map the weights of other ranks into this rank's module.

        Args:
            tickets: of the other ranks' files.
            owned: names of the tensors that this rank owns, which are copied to.

        Returns:
            Whether the files could be read.
        """
        files = read_files(tickets)
        if files is None:
            return False
        for file in files:
            put_mapped(self._module, file["weights"], owned)
        return True

    def close(self) -> None:
        """Close the file; all other ranks have opened it by now."""
        if self._file is not None:
            self._file.close()
            self._file = None


def put_mapped(
    module: nn.Module, values: Mapping[str, Tensor], owned: Collection[str] = ()
) -> None:
    """Give parameters and buffers the values that are mapped from a file.

    Those that this rank owns, or that others share memory with, keep their memory, and are copied
    to.
    """
    tensors = tensors_of(module)
    with torch.no_grad(), as_they_are():
        for name, value in values.items():
            tensor = tensors[name]
            alike = tensor.shape == value.shape and tensor.layout is value.layout is torch.strided
            if is_vacant(tensor):
                tensor.data = value
            elif alike and (name in owned or tensor.device.type != "cpu" or is_shared(tensor)):
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device, tensor.dtype)
