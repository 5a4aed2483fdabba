"""How a checkpoint reaches the disk: a kill in the middle of it leaves the previous file whole."""

import os
from pathlib import Path
from typing import Any

import torch

from lightning_hybrid._lightning import CheckpointIO, TorchCheckpointIO
from lightning_hybrid._lightning_private import WrappingCheckpointIO


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
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


def with_atomic_writes(io: CheckpointIO | None) -> CheckpointIO:
    """The user's checkpoint IO, else one that writes a file whole or not at all."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):
        # as in Lightning: one that was made around another keeps that one
        io.checkpoint_io = AtomicCheckpointIO()
    return io
