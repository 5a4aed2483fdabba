"""Tensors in a file without a name, from which processes of this host map what they read.

Workers write what they own to such files, and their driver maps these. A mapped file takes memory
only for what was read, and the system may take that back, as it does with every file. What the
driver writes to a mapped tensor changes the driver's own copy, and not the file. Where the driver
cannot open a worker's file, as on another host, the worker sends the tensors one by one, and the
driver writes them to a file of its own. A file lives as long as any process has it open; a kill
leaves nothing on the disk.

`load_unread` loads a checkpoint that the address space of a process has no room for. As torch reads
the checkpoint, each large storage is written to a file without a name and freed, and a tensor is
read from there when it is needed (:mod:`lightning_hybrid.remote.unread`). So at most one large
storage at a time is in memory.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are, is_shared, storage_key
from lightning_hybrid._trees import Token, rebuild, tensors_in
from lightning_hybrid.comm import Answer, TensorSpec, bytes_of
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import gigabytes
from lightning_hybrid.profiling import free_addresses, free_on
from lightning_hybrid.remote import (
    PAGE_OUT,
    Unread,
    is_deferred,
    is_unread,
    is_vacant,
    leave_unread,
    let_go_of_pages,
    mappings,
    show,
    unread,
    value_of,
)
from lightning_hybrid.stage import tensors_of

PIECE_BYTES = 64 * 2**20
"""Most bytes that are copied at once."""
_TOKEN_BYTES = _ALIGNED = 64


class NoAddresses(HybridError):
    """Tensors cannot be mapped into this process, whose address space is limited (``ulimit -v``).

    They are of a checkpoint or of another rank; or a checkpoint keeps them in objects from which
    they cannot be read one by one.
    """


class NoRoom(OSError):
    """Neither a disk nor the memory of this process has room for a file of tensors."""


@dataclass(frozen=True)
class _PlaceInFile(Token):
    """Stands in place of a tensor in nested containers, and says where in a file its numbers are.

    Attributes:
        offset: place of its first byte, counted from the beginning of the file.
        spec: its shape, type and strides.
    """

    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class _PlaceInMessage(Token):
    """Stands in place of a tensor in nested containers, and says which tensor of a message it is.

    Attributes:
        number: number of the tensor among those of the message, from 0.
    """

    number: int


@dataclass(frozen=True)
class Ticket:
    """What other processes of the host need to read a file.

    Attributes:
        path: path of the file, which can be opened while its writer has the file open.
        token: its first bytes, to compare: on another host the path may lead to another file.
        value: the nested containers that were written, with a `_PlaceInFile` in place of each dense
            tensor.
    """

    path: str
    token: bytes
    value: Any


class TensorFile:
    """A file without a name, to which this process writes tensors for itself or for others.

    Args:
        folder: where to make it; the system's temporary one if nothing can be written there.
        nbytes: how many bytes will be written; 0: not known. Where no disk has room for them, and
            the memory has, the file is one in memory.

    Raises:
        NoRoom: there is no room for so many bytes.
    """

    def __init__(self, folder: str, nbytes: int = 0) -> None:
        self._file = _nameless_file(folder, nbytes)
        self._kept = _OpenFile(self._file)
        # by the time the path is opened its process number may be that of another host or process
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._file.write(self._token)

    def write(self, value: Any) -> Ticket:
        """Write the dense tensors in nested containers, and return the ticket to read them all by.

        Args:
            value: the containers. What else is in them, sparse and empty tensors too, goes into the
                ticket as it is.

        Raises:
            OSError: there is no room for the tensors.
        """
        return self.ticket(rebuild(value, lambda p: self._write(p) if _is_dense(p) else p))

    def mapped(self, packed: Any) -> Any:
        """Return nested containers with tensors that were written; the tensors map this file.

        They do so also after :meth:`close`.

        Args:
            packed: the containers, with tokens of :meth:`store` in place of tensors.
        """
        self._file.flush()
        return _mapped_by(os.fdopen(os.dup(self._file.fileno()), "rb"), packed)

    def store(self, spec: TensorSpec, pieces: Iterable[Tensor]) -> Token:
        """Write a tensor that comes in pieces; return a token for it.

        The token stands in place of the tensor in what :meth:`mapped` and :meth:`ticket` are given.

        Args:
            spec: shape, type and strides of the tensor.
            pieces: its bytes in the order of memory, as tensors on the CPU.

        Raises:
            OSError: there is no room for it.
        """
        offset = self._file.seek(-self._file.tell() % _ALIGNED, os.SEEK_CUR)
        for piece in pieces:
            self._file.write(piece.numpy().data)
        return _PlaceInFile(offset, spec)

    def ticket(self, packed: Any) -> Ticket:
        """Return the ticket by which other processes, and this one, read what was written.

        They must open the file before :meth:`close` is called here.

        Args:
            packed: nested containers, with tokens of :meth:`store` in place of tensors.
        """
        self._file.flush()
        # a file without a name can be opened by the descriptor of a process that has it
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return Ticket(path, self._token, packed)

    def keep(self, memory: Tensor) -> Callable[[], Tensor]:
        """Write bytes that this process reads again; return a function that maps them.

        The function returns them as a tensor of bytes, each time in memory of its own. The file
        must not be closed while the function is in use.

        Args:
            memory: the bytes, as a tensor on the CPU with one dimension.
        """
        begin = self._file.seek(-self._file.tell() % _ALIGNED, os.SEEK_CUR)
        for piece in memory.split(PIECE_BYTES):
            self._file.write(piece.numpy().data)
        self._file.flush()
        kept, nbytes = self._kept, memory.numel()
        return lambda: bytes_in(kept.file, begin, nbytes)

    def close(self) -> None:
        """Close the file here. Whoever has opened or mapped it by now can read on."""
        self._file.close()

    def _write(self, tensor: Tensor) -> Token:
        spec = TensorSpec.of(tensor, gradient=False)
        return self.store(spec, pieces_of(spec.laid_out(tensor)))


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor in the order of memory, piece by piece, as tensors on the CPU.

    Args:
        tensor: a tensor without gaps between its numbers, in any order of dimensions.
    """
    for piece in bytes_of(tensor).split(PIECE_BYTES):
        yield piece.cpu()


def _nameless_file(folder: str, nbytes: int) -> BinaryIO:
    """Make a file without a name, to write and read; for the arguments see :class:`TensorFile`.

    Raises:
        NoRoom: there is no room for so many bytes.
    """
    writable = Path(folder).is_dir() and os.access(folder, os.W_OK)
    for place in (folder, None) if writable else (None,):
        with suppress(OSError):
            file = TemporaryFile(dir=place)  # noqa: SIM115  others open it
            disk = os.fstatvfs(file.fileno())
            # (file systems that do not tell say that they have no blocks at all)
            if not disk.f_blocks or nbytes <= disk.f_bavail * disk.f_frsize:
                return cast(BinaryIO, file)
            file.close()
    free = free_on(torch.device("cpu"))
    if hasattr(os, "memfd_create") and (free is None or nbytes < free):
        return os.fdopen(os.memfd_create("tensors"), "w+b")
    raise NoRoom(
        errno.ENOSPC,
        f"There is no room for {gigabytes(nbytes)} of tensors: neither in this folder, nor in the "
        "system's temporary one (TMPDIR), nor in memory",
        folder,
    )


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0


def read_files(tickets: Iterable[Ticket]) -> list[Any] | None:
    """Read what processes of this host have written; the tensors map the files.

    What is written to such a tensor changes it in this process alone. If the address space has no
    room for a whole file, each of its tensors is mapped alone, when it is first read.

    Args:
        tickets: the tickets of the files, which their writers still have open.

    Returns:
        The nested containers of each ticket; ``None``: a file cannot be read, since its writer is
        on another host.
    """
    read = [_read(ticket) for ticket in tickets]
    return None if None in read else read


def _read(ticket: Ticket) -> Any | None:
    # (in containers process numbers are small: on another host the path may lead to a pipe of this
    # process, and a read from it would wait for ever)
    try:
        if not Path(ticket.path).is_file():
            return None
        file = Path(ticket.path).open("rb")  # noqa: SIM115  unread tensors keep it
    except OSError:
        return None
    if file.read(_TOKEN_BYTES) != ticket.token:
        file.close()
        return None
    return _mapped_by(file, ticket.value)


def _mapped_by(file: BinaryIO, packed: Any) -> Any:
    """Put the tensors of a file into nested containers, without reading them.

    They map the file. If the address space has no room for all of it, each is mapped alone when it
    is first read, and the file stays open as long as one is unread. Else the file is closed at
    once.

    Args:
        file: file with the tensors, open for reading; the caller must not use it any more.
        packed: the containers, with tokens of :meth:`TensorFile.store` in place of tensors.
    """
    # in a limited address space a whole file could leave too little to compute with
    if not may_be_mapped(file):
        return rebuild(packed, _unread_from(file))
    memory = _map(file)
    file.close()
    return rebuild(packed, _mapped_from(memory))


def may_be_mapped(file: BinaryIO) -> bool:
    """Whether the address space has room to map a whole file, and as much again for computing.

    Always if the system sets it no limit.
    """
    left = free_addresses()
    return left is None or 2 * os.fstat(file.fileno()).st_size <= left


def _map(file: BinaryIO, begin: int = 0, size: int = 0) -> mmap.mmap:
    """Map a part of a file. What is written to the memory changes it in this process alone.

    The memory is registered in `_mapped`, where :func:`let_go` finds it.

    Args:
        file: the file, open for reading.
        begin: place of the first byte.
        size: number of bytes; 0: up to the end of the file.

    Returns:
        The memory. It begins where the page begins that has the first byte.

    Raises:
        NoAddresses: the address space has no room for it.
    """
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
"""The memory that :func:`_map` has mapped in this process, by the address of its first byte."""


def _address(memory: Any) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def let_go(part: memoryview) -> None:
    """Let the system take back mapped memory that is not needed for the moment.

    When it is read again it has the same contents, changes included.

    Args:
        part: the memory; nothing happens if it was not mapped here.
    """
    if not part.nbytes:
        return
    first = _address(part)
    for start, memory in _mapped.items():
        if start <= first < start + len(memory):
            # the system takes whole pages: what else is on the first one is read again if needed
            begin = (first - start) // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):  # not every system can
                memory.madvise(PAGE_OUT, begin, first - start + part.nbytes - begin)


_checkpoints: set[str] = set()
"""Paths of the checkpoints that torch has mapped."""


def remember_mapped(path: str | Path) -> None:
    """Note that torch has mapped a checkpoint, so that :func:`let_go_of_checkpoints` covers it."""
    _checkpoints.add(str(Path(path).resolve()))


def let_go_of_checkpoints() -> None:
    """Let the system take back the memory of all checkpoints that torch has mapped.

    Called when a rank has sent what it has read of them, or copied it to its weights. What is read
    again has the same contents.
    """
    if not _checkpoints:
        return
    # torch keeps its mappings to itself; the system knows them all
    for begin, end, path in mappings():
        if path in _checkpoints:
            let_go_of_pages(begin, end)


class _OpenFile:
    """Keeps a file open as long as anything refers to this object; then the file is closed.

    The functions that read unread tensors from the file refer to it.

    Args:
        file: the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        finalize(self, file.close)


def _unread_from(file: BinaryIO) -> Callable[[Any], Any]:
    """Return a function that turns a `_PlaceInFile` into an unread tensor; all else it returns.

    Args:
        file: the file with the tensors; it is closed when none of them is unread any more.
    """
    kept = _OpenFile(file)

    def unread_one(part: Any) -> Any:
        if not isinstance(part, _PlaceInFile):
            return part
        spec = part.spec
        nbytes = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        stride = spec.strides or torch.empty(spec.shape, device="meta").stride()
        form = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device="meta")
        return unread(form, lambda: bytes_in(kept.file, part.offset, nbytes))

    return unread_one


def bytes_in(file: BinaryIO, begin: int, nbytes: int) -> Tensor:
    """Map bytes of a file, and return them as a tensor with one dimension.

    What is written to the tensor changes it in this process alone.

    Args:
        file: the file, open for reading.
        begin: place of the first byte.
        nbytes: number of bytes.

    Raises:
        NoAddresses: the address space has no room for so many.
    """
    memory = _map(file, begin, nbytes)
    before = len(memory) - nbytes
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=before)


def _mapped_from(memory: mmap.mmap) -> Callable[[Any], Any]:
    """Return a function that turns a `_PlaceInFile` into a tensor in mapped memory.

    All else it returns as it is.

    Args:
        memory: the whole file with the tensors, from :func:`_map`.
    """

    def mapped(part: Any) -> Any:
        if not isinstance(part, _PlaceInFile):
            return part
        spec = part.spec
        count = torch.Size(spec.shape).numel()
        flat = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=part.offset)
        if spec.strides is None:
            return flat.view(spec.shape)
        return flat.as_strided(spec.shape, spec.strides)

    return mapped


_SMALL_BYTES = 2**16
"""A storage of at most so many bytes is read when the checkpoint is loaded."""


def load_unread(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint whose large tensors are read only when they are needed.

    They are read from a copy, which is written to a file without a name while torch loads the
    checkpoint, in the same folder if possible.

    Args:
        path: path of the file.
        weights_only: as in `torch.load`.

    Returns:
        The checkpoint, in which tensors of large storages are unread ones.

    Raises:
        NoAddresses: objects that are no containers have large tensors.
        OSError: there is no room for the copy.
    """
    file = TensorFile(str(Path(path).parent))
    kept: dict[int, tuple[torch.UntypedStorage, Unread]] = {}

    def keep(storage: Any, _: str) -> Any:
        if storage.nbytes() <= _SMALL_BYTES:
            return storage
        # (torch calls this with each storage that it has read: from here on the file has it)
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


def to_send(value: Any) -> tuple[Any, list[TensorSpec], list[Tensor]]:
    """Take the dense tensors out of nested containers, to be sent to a rank that calls `filed`.

    Args:
        value: the containers. What else is in them, sparse and empty tensors too, stays there, on
            the CPU.

    Returns:
        The containers with a `_PlaceInMessage` for each dense tensor; for each its shape, type and
        strides; and the tensors, in the order of their numbers.
    """
    found: list[Tensor] = []

    def take(part: Any) -> Any:
        if not _is_dense(part):
            return part.cpu() if isinstance(part, Tensor) else part
        found.append(part)
        return _PlaceInMessage(len(found) - 1)

    packed = rebuild(value, take)
    return packed, [TensorSpec.of(tensor, gradient=False) for tensor in found], found


def filed(
    packed: Any, specs: Sequence[TensorSpec], tensors: Iterable[Iterable[Tensor]], folder: str
) -> Any:
    """Write tensors that another rank sends to a file of this rank, as they come, and map them.

    Args:
        packed: the containers that :func:`to_send` has returned there.
        specs: for each tensor its shape, type and strides, likewise.
        tensors: for each tensor its bytes in the order of memory, in pieces on the CPU; they are
            received here.
        folder: preferred folder of the file.

    Returns:
        The containers with the tensors, which map the file.

    Raises:
        NoRoom: there is no room for the file.
    """
    nbytes = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)
    try:
        with closing(TensorFile(folder, nbytes)) as file:
            places = [file.store(spec, pieces) for pieces, spec in zip(tensors, specs)]
            return file.mapped(
                rebuild(packed, lambda p: places[p.number] if isinstance(p, _PlaceInMessage) else p)
            )
    except NoRoom:
        raise
    except OSError as error:  # (a quota, say, of which nothing was known before)
        raise NoRoom(error.errno, f"A file of tensors: {error.strerror}", folder) from error


class FilesOfWorker:
    """Makes a worker's answers that hand tensors to its driver: in a file, or one by one.

    The file of the last answer stays open.
    """

    def __init__(self) -> None:
        self._file: TensorFile | None = None

    def answer(self, value: Any, folder: str | None) -> Answer:
        """Make the answer to a command to write tensors to a file, or to send them.

        The file of the answer before is closed.

        Args:
            value: nested containers with the tensors.
            folder: where to make the file, if possible; ``None``: the tensors are sent.

        Returns:
            An answer. If there is a file, its value is the file's `Ticket`; ``None``: there is no
            room for one. If tensors are sent, its tensors are these, and its value is a pair: the
            containers, with a `_PlaceInMessage` for each tensor, and the specs.
        """
        self.close()
        packed, specs, found = to_send(value)
        if folder is None:
            named = ((str(number), tensor) for number, tensor in enumerate(found))
            return Answer(value=(packed, specs), tensors=named)
        with suppress(OSError):
            self._file = TensorFile(folder, sum(tensor.nbytes for tensor in found))
            return Answer(value=self._file.write(value))
        return Answer()

    def close(self) -> None:
        """Close the file of the last answer, if there is one; the driver has opened it by now."""
        if self._file is not None:
            self._file.close()
            self._file = None


def received(answer: Answer, folder: str) -> Any:
    """On a driver, write the tensors that a worker sends to a file of this rank, and map them.

    Args:
        answer: what :meth:`FilesOfWorker.answer` has made without a folder; its tensors are
            received here.
        folder: preferred folder of the file.

    Returns:
        The worker's nested containers with the tensors, which map the file.

    Raises:
        NoRoom: there is no room for the file.
    """
    packed, specs = answer.value
    come = zip(answer.tensors, specs)  # (in this order, so that none is left to be received)
    whole = (pieces_of(spec.laid_out(tensor)) for (_, tensor), spec in come)
    return filed(packed, specs, whole, folder)


def put_mapped(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give parameters and buffers of a module the values that are mapped from files.

    A parameter or buffer gets the memory of its value, or becomes an unread tensor as its value is.
    It keeps its memory, and the value is copied to it, if other tensors share that memory, or if it
    is on a GPU and its value is mapped.

    Args:
        module: the module.
        values: the values by name in the module, mapped or unread.
    """
    tensors = tensors_of(module)
    with torch.no_grad(), as_they_are():
        for name, value in values.items():
            tensor = tensors[name]
            alike = tensor.shape == value.shape and tensor.layout is value.layout is torch.strided
            if is_unread(value):
                # (views of this memory would keep the old numbers if it were replaced)
                if not is_vacant(tensor) and is_shared(tensor):
                    tensor.copy_(value_of(value))
                else:
                    leave_unread(tensor, name, value)
            elif is_deferred(tensor):
                show(tensor, value)
            elif is_vacant(tensor):
                tensor.data = value
            elif alike and (tensor.device.type != "cpu" or is_shared(tensor)):
                tensor.copy_(value)
            else:
                tensor.data = value.to(tensor.device, tensor.dtype)
