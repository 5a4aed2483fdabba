"""Writes checkpoints so that a kill in the middle of it leaves the previous one whole.

A checkpoint is written beside the one that it replaces, as ``.NAME.part``, and gets its name when
it is on the disk. If one of the two is a folder, their paths are exchanged in one step, where the
system can: after a kill there is always a checkpoint of that name. Asynchronous checkpoints are
written by jobs that run beside training (:class:`Background`).
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, Protocol, cast
from zipfile import is_zipfile

import torch

from lightning_hybrid._lightning import CheckpointIO, TorchCheckpointIO
from lightning_hybrid._lightning_private import WrappingCheckpointIO
from lightning_hybrid.comm import BackgroundThread
from lightning_hybrid.remote import streaming
from lightning_hybrid.state.sharded_checkpoint import (
    LAST_S,
    is_sharded,
    named_disk_errors,
    read_sharded,
)
from lightning_hybrid.state.tensor_file import (
    PIECE_BYTES,
    let_go,
    load_unread,
    may_be_mapped,
    remember_mapped,
)


class Background:
    """Runs one job after the other, each in a thread that ends with the process."""

    def __init__(self) -> None:
        self._last: BackgroundThread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job in a thread when all earlier ones are over; if one has failed, skip it."""
        before = self._last

        def run() -> None:
            # in order: a later job may remove what an earlier one replaces
            if before is not None:
                before.join()
            # after a failed save the checkpoint before it must not be removed
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = error

        self._last = BackgroundThread(run, "checkpoints")
        self._last.start()

    @property
    def busy(self) -> bool:
        """Whether a job is not done yet, or has failed since the last `wait`."""
        alive = self._last is not None and self._last.is_alive()
        return alive or self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all jobs are done.

        Args:
            timeout_s: the longest time to wait; ``None``: no limit.

        Raises:
            BaseException: the error of the first job that has failed since the last call.
        """
        if self._last is not None:
            self._last.join(timeout_s)
        error, self._error = self._error, None
        if error is not None:
            raise error


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders. Returns whether this system and file system can do it."""
    try:
        # `os` has no call that exchanges two names
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    paths = [os.fsencode(path) for path in (one, other)]
    return not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a new file in the checkpoint's folder, which replaces the old one when it is complete.

    Lightning's own class writes to the system's temporary folder and then moves the file, which is
    a plain copy if that folder is on another file system: a kill leaves half a file. It also holds
    the file in memory, twice. Paths that are URLs are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: what to save.
            path: where to.
            storage_options: refused, as by Lightning's own class.
        """
        # file systems behind URLs have no rename that replaces in one step
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        with (
            becoming(_new(target), target) as new,
            named_disk_errors(path),
            new.open("wb") as file,
            # weights of other ranks are fetched one by one as they are written: all may not fit
            streaming(),
        ):
            torch.save(checkpoint, cast(BinaryIO, _LettingGo(file)))
            file.flush()
            # contents first: a name without them would be an empty file after a power cut
            os.fsync(file.fileno())

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint; tensors in a file of this host are read only when they are needed.

        Args:
            path: the file, the folder of a sharded checkpoint, or a URL.
            map_location: as in Lightning.
            weights_only: likewise.
        """
        if "://" not in str(path) and Path(path).is_dir():
            return read_sharded(path, weights_only)
        # files of the format before torch 1.6 cannot be mapped
        if "://" in str(path) or not is_zipfile(path):
            return super().load_checkpoint(path, map_location, weights_only)
        with Path(path).open("rb") as file:
            if not may_be_mapped(file):
                return load_unread(path, weights_only)
        # mapped, since a rank needs only some of it: pages that are not read take no memory
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=True
        )
        remember_mapped(path)
        return loaded


class Stager(Protocol):
    """What `ShardedSaves` needs of a session: copies of tensors, written while it trains."""

    def stage_shards(
        self, checkpoint: dict[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]: ...
    def await_shards(self) -> None: ...


class ShardedSaves:
    """Saves and removes sharded checkpoints, in order, also in the background of training.

    A checkpoint is removed only when all saves that were begun before are complete: else a kill
    could leave none.
    """

    def __init__(self) -> None:
        self._background, self._given_up = Background(), Event()

    def __reduce__(self) -> Any:
        """A copy (of the strategy) has no saves under way."""
        return ShardedSaves, ()

    def save(self, write: Callable[[Path], None], target: Path) -> None:
        """Save a checkpoint, and return when that is done.

        Args:
            write: writes the checkpoint to a folder.
            target: the path that this folder gets.
        """
        with becoming(new_folder(target), target) as folder:
            write(folder)

    def begin(self, stager: Stager, checkpoint: dict[str, Any], target: Path) -> None:
        """Begin to save, and return when tensors are copied: they are written in the background.

        Args:
            stager: the session.
            checkpoint: what to save.
            target: the folder of the checkpoint.

        Raises:
            OSError: the save before has failed.
        """
        self.finish(stager)  # so that there are copies of one checkpoint at most
        # an event for each save: that of one which was given up must not end this one
        folder, self._given_up = new_folder(target), Event()
        try:
            write = stager.stage_shards(checkpoint, folder, self._given_up)
        except BaseException:
            with suppress(OSError):
                _remove(folder)
            raise

        def become() -> None:
            with becoming(folder, target):
                write()

        self._background.submit(become)

    def remove(self, target: Path) -> None:
        """Remove a checkpoint, unless a save that is under way fails."""
        if self._background.busy:
            # after these saves: until they are done this may be the only complete checkpoint
            self._background.submit(partial(_remove_checkpoint, target))
        else:
            _remove_checkpoint(target)

    def finish(self, stager: Stager) -> None:
        """Wait until all saves are done.

        Raises:
            OSError: a save has failed.
        """
        if self._background.busy:
            stager.await_shards()
        self._background.wait()

    def give_up(self) -> None:
        """After an error of the run: wait for saves under way at most `LAST_S`, then drop them."""
        with suppress(Exception):  # the first error is what counts
            self._background.wait(LAST_S)
        self._given_up.set()


def _new(target: Path) -> Path:
    """The path where what replaces ``target`` is written: nothing is there, and its folder is."""
    if target.is_dir() and not is_sharded(target):
        raise IsADirectoryError(
            errno.EISDIR, "a checkpoint cannot take the place of a folder", str(target)
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(target, "part")
    _remove(new)
    return new


def new_folder(target: Path) -> Path:
    """A folder that is to become ``target``; see :func:`becoming`."""
    folder = _new(target)
    folder.mkdir()
    return folder


@contextmanager
def becoming(new: Path, target: Path) -> Iterator[Path]:
    """Inside, a file or folder is filled. Then it replaces ``target``; after an error it goes.

    A kill leaves it, under a name that begins with a dot, and the next attempt removes it.
    """
    try:
        yield new
        _put_in_place(new, target)
    except BaseException:
        with suppress(OSError):  # (a rank of a failed run may still write to a folder)
            _remove(new)
        raise


def _remove_checkpoint(target: Path) -> None:
    if is_sharded(target):  # renamed first: a kill must not leave a part under its name
        gone = _beside(target, "gone")
        _remove(gone)
        target.rename(gone)
        _remove(gone)
    elif target.is_file():
        target.unlink()


def _beside(target: Path, what: str) -> Path:
    # (Lightning takes what has `hpc_ckpt_` in its name for a checkpoint that a job of SLURM left)
    return target.with_name(f".{target.name}.{what}".replace("hpc_ckpt_", "hpc_ckpt-"))


def _put_in_place(new: Path, target: Path) -> None:
    """Move a file or folder to ``target``, and remove what was there."""
    before = _beside(target, "before")
    if not (target.is_dir() or (new.is_dir() and target.exists())):
        new.replace(target)
    elif exchange(new, target):
        _remove(new)
    else:  # (a kill in between leaves the old one, as `.NAME.before`)
        _remove(before)
        target.rename(before)
        new.rename(target)
    _remove(before)
    # a rename is on the disk when the folder is
    folder = os.open(target.parent, os.O_RDONLY)
    with suppress(OSError):  # not every file system can
        os.fsync(folder)
    os.close(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _LettingGo:
    """A file to write to, which lets go of the mapped memory that data comes from once written.

    Args:
        file: the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        """Write a part of the file, such as a whole tensor."""
        written = 0
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            written += self._file.write(piece)
            let_go(piece)
        return written

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def with_atomic_writes(io: CheckpointIO | None) -> CheckpointIO:
    """The user's checkpoint IO, else an `AtomicCheckpointIO`; a wrapper gets one inside."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):
        # (as in Lightning, a wrapper that was made around another IO keeps that one)
        io.checkpoint_io = AtomicCheckpointIO()
    return io
