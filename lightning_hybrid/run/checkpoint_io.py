"""Lightning's plugin that writes and reads checkpoints, by the functions of this package."""

from pathlib import Path
from typing import Any

from lightning_hybrid._lightning import CheckpointIO, TorchCheckpointIO
from lightning_hybrid._lightning_private import WrappingCheckpointIO
from lightning_hybrid.state import load_checkpoint, save_checkpoint


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint plugin that writes each checkpoint file whole or not at all.

    It loads files, and folders of sharded checkpoints, tensor by tensor when they are needed.

    It writes a new file in the folder of the checkpoint, which replaces the old file when it is
    complete. Lightning's own plugin writes to the system's temporary folder and then moves the
    file, which is a plain copy if that folder is on another file system: a kill leaves half a file.
    That plugin also holds the file in memory, twice. Paths that are URLs are left to it.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint.

        Args:
            checkpoint: what to save.
            path: the file to write.
            storage_options: must be ``None``; others are refused, as by Lightning's own plugin.
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
            map_location: as in `torch.load`; by default tensors stay on the CPU.
            weights_only: as in `torch.load`.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return load_checkpoint(path, map_location, weights_only)


def with_atomic_writes(io: CheckpointIO | None) -> CheckpointIO:
    """Return the checkpoint plugin to use, which writes files whole or not at all where possible.

    Args:
        io: the user's plugin, which is returned. If it wraps another plugin (as for asynchronous
            saves), it gets an `AtomicCheckpointIO` inside. ``None``: return an
            `AtomicCheckpointIO`.
    """
    if io is None:
        return AtomicCheckpointIO()
    if isinstance(io, WrappingCheckpointIO):
        # (as in Lightning, a wrapper that was made around another IO keeps that one)
        io.checkpoint_io = AtomicCheckpointIO()
    return io
