"""How a checkpoint reaches the disk: a kill in the middle of it leaves the previous file whole."""

import os
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import is_zipfile

import torch

from lightning_hybrid._lightning import CheckpointIO, TorchCheckpointIO
from lightning_hybrid._lightning_private import WrappingCheckpointIO
from lightning_hybrid.runtime import PIECE_BYTES, let_go


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
        # always the same name, so that what a kill leaves is overwritten by the next attempt
        beside = target.with_name(f".{target.name}.part")
        try:
            with beside.open("wb") as file:
                letting_go: Any = _LettingGo(file)
                torch.save(checkpoint, letting_go)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

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
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=True
        )
        return loaded


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
