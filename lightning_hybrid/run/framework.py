"""What a run asks of the framework that has begun it: Lightning's Trainer, or Fabric.

Fabric has no loops: it counts no batches, and does not know how a run has ended.
"""

from pathlib import Path

from lightning_hybrid._lightning import Trainer, TrainerStatus


class TrainerFramework:
    """What a run asks of the Trainer that has begun it.

    Args:
        trainer: the Trainer.

    Attributes:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    @property
    def folder(self) -> str:
        """Preferred folder for the files in which ranks of a host hand tensors to each other."""
        return self.trainer.default_root_dir

    @property
    def batches(self) -> int:
        """Number of training batches before the current one, over all epochs."""
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer steps once for several batches, whose gradients are added up."""
        return self.trainer.accumulate_grad_batches > 1

    @property
    def went_well(self) -> bool:
        """Whether neither an error nor Ctrl-C has ended the run."""
        return self.trainer.state.status != TrainerStatus.INTERRUPTED


class FabricFramework:
    """What a run asks of Fabric, with the attributes of :class:`TrainerFramework`.

    Attributes:
        accumulates: ``False``, since Fabric's loop is the user's own.
        went_well: ``True``; an error ends a run of Fabric in another way.
        folder: the current folder.
        batches: number of training batches before the current one; the strategy counts it up when a
            batch has begun.
    """

    accumulates = False
    went_well = True

    def __init__(self) -> None:
        self.folder = str(Path.cwd())
        self.batches = 0


Framework = TrainerFramework | FabricFramework
"""What a run needs of the framework."""
