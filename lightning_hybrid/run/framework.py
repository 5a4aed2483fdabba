"""What a run asks of what has begun it: Lightning's Trainer, or Fabric.

Fabric has no loops, and knows neither batches nor states of a run.
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
    """What has begun a run.

    Attributes:
        folder: where ranks write what others map, if possible.
        batches: number of training batches that have begun so far.
        streams: whether a checkpoint is written at once, tensor by tensor.
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
        """On a driver: the results of a run that went well.

        Args:
            returned: what the run returns.
        """

    def adopt(self, results: Results) -> None:
        """On a worker: what its driver has collected."""


class ByTrainer:
    """A run of a Trainer.

    Args:
        trainer: Lightning's, before drivers and workers part.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self._before = trainer, Snapshot(trainer)

    @property
    def folder(self) -> str:
        """That of the Trainer."""
        return self.trainer.default_root_dir

    @property
    def batches(self) -> int:
        """As the fit loop counts them."""
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    @property
    def streams(self) -> bool:
        """Whether the user has given no other CheckpointIO."""
        return type(self.trainer.strategy.checkpoint_io) is AtomicCheckpointIO

    @property
    def went_well(self) -> bool:
        """What the Trainer says of it."""
        return self.trainer.state.status != TrainerStatus.INTERRUPTED

    def collect(self, returned: Any) -> Results:
        """On a driver: with what has changed in the modules and callbacks."""
        return collect_results(self.trainer, returned, self._before)

    def adopt(self, results: Results) -> None:
        """On a worker: but for what this rank has changed itself."""
        adopt_results(self.trainer, cast(TrainerResults, results), self._before)
