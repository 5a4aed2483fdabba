"""Lightning's plugin that writes and reads checkpoints, by the functions of this package."""

from pathlib import Path
from typing import Any

from lightning_hybrid._lightning import CheckpointIO, TorchCheckpointIO
from lightning_hybrid._lightning_private import WrappingCheckpointIO
from lightning_hybrid.state import load_checkpoint, save_checkpoint


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
        else:
            save_checkpoint(checkpoint, path)

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
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return load_checkpoint(path, map_location, weights_only)


def with_atomic_writes(io: CheckpointIO | None) -> CheckpointIO:
    """The user's checkpoint IO, else an `AtomicCheckpointIO`; a wrapper gets one inside."""
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):
        # (as in Lightning, a wrapper that was made around another IO keeps that one)
        io.checkpoint_io = AtomicCheckpointIO()
    return io
