"""How a checkpoint reaches the disk: a kill in the middle of it leaves the previous file whole.

Where a file or folder is replaced, the two paths change places at once: a kill finds both as
before, or both exchanged.
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
from lightning_hybrid.remote import streaming
from lightning_hybrid.state.background import Background
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
    """Writes to a file beside the checkpoint, and puts it in its place when it is on the disk.

    Lightning's own writes to the system's temporary folder and then moves, which is a plain copy
    where that folder is on another file system: a kill leaves half a file. It also holds the file
    in memory, twice. Paths that are URLs are left to Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: what to save.
            path: where to.
            storage_options: refused, as Lightning's own does.
        """
        # file systems behind URLs have no rename that replaces at once
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            _Beside(target) as file,
            # weights of other ranks come one by one as they are written: all may not fit
            streaming(),
            named_disk_errors(path),
        ):
            torch.save(checkpoint, cast(BinaryIO, _LettingGo(file)))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint: on this host it is read where its numbers are needed.

        Args:
            path: of the file, of the folder of a sharded checkpoint, or a URL.
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
        # a rank needs some of it: pages that nobody reads take no memory
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=True
        )
        remember_mapped(path)
        return loaded


class _Beside:
    """A file that takes the place of another one when the block has ended well, else of none.

    Until then it has no name, so that a kill leaves nothing; on file systems that know no such
    files it has always the same one, and the next attempt writes over it.

    Args:
        target: the path of the other one.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._named = target.with_name(f".{target.name}.part")
        self._has_name = False

    def __enter__(self) -> BinaryIO:
        self._file = self._open()
        return self._file

    def _open(self) -> BinaryIO:
        if hasattr(os, "O_TMPFILE"):
            with suppress(OSError):
                # what has no name goes with its process, whatever ends that
                flags = os.O_TMPFILE | os.O_WRONLY
                return os.fdopen(os.open(self._target.parent, flags, 0o666), "wb")
        self._has_name = True
        return self._named.open("wb")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                # a name on the disk before its contents is an empty file after a power cut
                os.fsync(self._file.fileno())
                if not self._has_name:
                    self._give_name()
                _refuse_other_folder(self._target)
                _put_in_place(self._named, self._target)
        finally:
            with suppress(OSError):  # what could not be written before cannot now
                self._file.close()
            self._named.unlink(missing_ok=True)

    def _give_name(self) -> None:
        self._named.unlink(missing_ok=True)
        # (the number of a folder, which is not used, makes Python follow the link)
        os.link(f"/proc/self/fd/{self._file.fileno()}", self._named, src_dir_fd=0)


class Stager(Protocol):
    """A session, as far as it writes sharded checkpoints while it trains."""

    def stage_shards(
        self, checkpoint: dict[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]: ...
    def await_shards(self) -> None: ...


class ShardedSaves:
    """Sharded checkpoints on their way to the disk, and from it, in the order in which they go.

    A checkpoint is removed when all that were saved before are there: else a kill would leave none.
    """

    def __init__(self) -> None:
        self._background, self._given_up = Background(), Event()

    def __reduce__(self) -> Any:
        """A copy of the strategy has none under way."""
        return ShardedSaves, ()

    def save(self, write: Callable[[Path], None], target: Path) -> None:
        """Save, and return when that is done.

        Args:
            write: fills a folder.
            target: that it becomes.
        """
        with _becoming(_new_folder(target), target) as folder:
            write(folder)

    def begin(self, stager: Stager, checkpoint: dict[str, Any], target: Path) -> None:
        """Save, and return when copies are made.

        Args:
            stager: the session.
            checkpoint: what to save.
            target: the folder.

        Raises:
            OSError: of the save before.
        """
        self.finish(stager)  # there are copies of one checkpoint at most
        # an event for each: that of a save which was given up must not end this one
        folder, self._given_up = _new_folder(target), Event()
        try:
            write = stager.stage_shards(checkpoint, folder, self._given_up)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

        def become() -> None:
            with _becoming(folder, target):
                write()

        self._background.submit(become)

    def remove(self, target: Path) -> None:
        """Remove a checkpoint, unless one that was saved after it fails."""
        if self._background.busy:
            # behind the saves under way: until they are done this may be the only whole one
            self._background.submit(partial(_remove_checkpoint, target))
        else:
            _remove_checkpoint(target)

    def finish(self, stager: Stager) -> None:
        """Wait until all is done.

        Raises:
            OSError: of a save that has failed.
        """
        if self._background.busy:
            stager.await_shards()
        self._background.wait()

    def give_up(self) -> None:
        """The run has failed: what workers still write is waited for, but not for long."""
        with suppress(Exception):  # the first error is what counts
            self._background.wait(LAST_S)
        self._given_up.set()


def _new_folder(target: Path) -> Path:
    _refuse_other_folder(target)
    folder = _beside(target, "part")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def _becoming(folder: Path, target: Path) -> Iterator[Path]:
    """Inside, a folder is filled. Then it takes the place of ``target``; after an error it goes.

    A kill leaves it, under a name that begins with a dot; the next attempt removes it.
    """
    try:
        yield folder
        _put_in_place(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_checkpoint(target: Path) -> None:
    if is_sharded(target):  # a kill must not leave a part that looks like it
        gone = _beside(target, "gone")
        shutil.rmtree(gone, ignore_errors=True)
        target.rename(gone)
        _remove(gone)
    elif target.is_file():
        target.unlink()


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _refuse_other_folder(target: Path) -> None:
    if target.is_dir() and not is_sharded(target):
        raise IsADirectoryError(
            errno.EISDIR, "a checkpoint cannot take the place of a folder", str(target)
        )


def _put_in_place(new: Path, target: Path) -> None:
    """Let a file or folder take the place of what is there, which is removed."""
    if not (target.is_dir() or (new.is_dir() and target.exists())):
        new.replace(target)
    elif exchange(new, target):
        _remove(new)
    else:  # a kill in here leaves what was there, under this name
        before = _beside(target, "before")
        _remove(before)
        target.rename(before)
        new.rename(target)
        _remove(before)
    # a rename is on the disk when its folder is
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
    """A file that gives memory back which other ranks' tensors were mapped to, once it is written.

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
        """As of any file."""
        self._file.flush()


def with_atomic_writes(io: CheckpointIO | None) -> CheckpointIO:
    """The user's checkpoint IO, else one that writes a file whole or not at all."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):
        # as in Lightning: one that was made around another keeps that one
        io.checkpoint_io = AtomicCheckpointIO()
    return io
