"""What a run needs of the framework that has begun it: Lightning's Trainer, or Fabric.

Fabric has no loops, and so neither batches nor the state of a run.
"""

from pathlib import Path

from lightning_hybrid._lightning import Trainer, TrainerStatus


class TrainerFramework:
    """The framework of a run that a Trainer has begun.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def folder(self) -> str:
        """Where ranks write tensors for each other, if possible: ``default_root_dir``."""
        return self.trainer.default_root_dir

    @property
    def batches(self) -> int:
        """Number of training batches that have begun so far."""
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several batches are accumulated."""
        return self.trainer.accumulate_grad_batches > 1

    @property
    def went_well(self) -> bool:
        """Whether the Trainer was not interrupted."""
        return self.trainer.state.status != TrainerStatus.INTERRUPTED


class FabricFramework:
    """The framework of a run that Fabric has begun.

    It has the attributes of :class:`TrainerFramework`.
    """

    accumulates = False
    went_well = True

    def __init__(self) -> None:
        self.folder = str(Path.cwd())
        self.batches = 0


Framework = TrainerFramework | FabricFramework
"""What a run needs of the framework."""
