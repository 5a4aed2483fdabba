"""What a run needs of the framework that has begun it: Lightning's Trainer, or Fabric.

Fabric has no loops, and so neither batches nor the state of a run.
"""

from typing import Any, Protocol, cast

from lightning_hybrid._lightning import Trainer, TrainerStatus
from lightning_hybrid.process import (
    Results,
    Snapshot,
    TrainerResults,
    adopt_results,
    collect_results,
)
from lightning_hybrid.state import AtomicCheckpointIO


class Framework(Protocol):
    """The Trainer or Fabric, as a run uses it.

    Attributes:
        folder: preferred folder for files with tensors that ranks leave for each other.
        batches: number of training batches that have begun so far.
        streams: whether checkpoints are written by this package, tensor by tensor.
        went_well: whether the run was not interrupted.
    """

    @property
    def folder(self) -> str: ...

    @property
    def batches(self) -> int: ...

    @property
    def streams(self) -> bool: ...

    @property
    def went_well(self) -> bool: ...

    def collect(self, returned: Any) -> Results:
        """On a driver, collect the results of a run that has ended without an error.

        Args:
            returned: what the run returns.
        """

    def adopt(self, results: Results) -> None:
        """On a worker, take over the results that its driver has collected."""


class ByTrainer:
    """The framework of a run that a Trainer has begun.

    Args:
        trainer: the Trainer, before workers leave it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self._before = trainer, Snapshot(trainer)

    @property
    def folder(self) -> str:
        """The Trainer's ``default_root_dir``."""
        return self.trainer.default_root_dir

    @property
    def batches(self) -> int:
        """Number of batches that the fit loop has counted."""
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    @property
    def streams(self) -> bool:
        """Whether the CheckpointIO is this package's, and none of the user's."""
        return type(self.trainer.strategy.checkpoint_io) is AtomicCheckpointIO

    @property
    def went_well(self) -> bool:
        """Whether the Trainer was not interrupted."""
        return self.trainer.state.status != TrainerStatus.INTERRUPTED

    def collect(self, returned: Any) -> Results:
        """On a driver, collect results, with the data changed in the module and callbacks."""
        return collect_results(self.trainer, returned, self._before)

    def adopt(self, results: Results) -> None:
        """On a worker, take over results."""
        adopt_results(self.trainer, cast(TrainerResults, results))
