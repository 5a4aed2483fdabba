"""How a checkpoint reaches the disk: a kill in the middle of it leaves the previous file whole."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast
from zipfile import is_zipfile

import torch

from lightning_hybrid._lightning import CheckpointIO, TorchCheckpointIO
from lightning_hybrid._lightning_private import WrappingCheckpointIO
from lightning_hybrid.runtime import PIECE_BYTES, let_go, load_unread, may_be_mapped
from lightning_hybrid.tensors import streaming


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
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _Beside(target) as file:
            letting_go = _LettingGo(file)
            try:
                with streaming():
                    torch.save(checkpoint, cast(BinaryIO, letting_go))
            except (OSError, RuntimeError):  # torch may say how far it has come, and not why
                if letting_go.failed is None:
                    raise
                code, reason = letting_go.failed.errno, letting_go.failed.strerror
                raise OSError(code, reason, str(path)) from None

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint: a file of this host is read where its numbers are needed.

        Args:
            path: of the file, or a URL.
            map_location: as in Lightning.
            weights_only: likewise.
        """
        if "://" in str(path) or not is_zipfile(path):
            return super().load_checkpoint(path, map_location, weights_only)
        with Path(path).open("rb") as file:
            if not may_be_mapped(file):
                return load_unread(path, weights_only)
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=True
        )
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
                flags = os.O_TMPFILE | os.O_WRONLY
                return os.fdopen(os.open(self._target.parent, flags, 0o666), "wb")
        self._has_name = True
        return self._named.open("wb")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                if not self._has_name:
                    self._give_name()
                self._named.replace(self._target)
        finally:
            with suppress(OSError):  # what could not be written before cannot now
                self._file.close()
            self._named.unlink(missing_ok=True)

    def _give_name(self) -> None:
        self._named.unlink(missing_ok=True)
        # (the number of a folder, which is not used, makes Python follow the link)
        os.link(f"/proc/self/fd/{self._file.fileno()}", self._named, src_dir_fd=0)


class _LettingGo:
    """A file that gives memory back which other ranks' tensors were mapped to, once it is written.

    Args:
        file: the file.

    Attributes:
        failed: why a part of it could not be written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: memoryview) -> int:
        """Write a part of the file, such as a whole tensor."""
        written = 0
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            try:
                written += self._file.write(piece)
                let_go(piece)
            except OSError as error:
                self.failed = error
                raise
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
