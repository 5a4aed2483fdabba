"""What a run needs of the framework that has begun it: Lightning's Trainer, or Fabric.

Fabric has no loops, and so neither batches nor the state of a run.
"""

from pathlib import Path
from typing import Any, cast

from torch import nn

from lightning_hybrid._lightning import Trainer, TrainerStatus
from lightning_hybrid.run.checkpoint_io import AtomicCheckpointIO
from lightning_hybrid.run.run_results import (
    Results,
    Snapshot,
    TrainerResults,
    adopt_results,
    collect_results,
)


class TrainerFramework:
    """The framework of a run that a Trainer has begun.

    Args:
        trainer: the Trainer, before workers leave it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._before = Snapshot(trainer)

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
    def streams(self) -> bool:
        """Whether checkpoints are written by this package, tensor by tensor."""
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
        adopt_results(self.trainer, cast(TrainerResults, results), self._before)


class FabricFramework:
    """The framework of a run that Fabric has begun.

    It has the attributes of :class:`TrainerFramework`.

    Args:
        module: the module that is trained.
    """

    streams = False
    accumulates = False
    went_well = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.folder = str(Path.cwd())
        self.batches = 0

    def collect(self, returned: Any) -> Results:
        """On a driver, collect the results of a run that has ended without an error."""
        return Results.of(self._module, returned)

    def adopt(self, results: Results) -> None:
        """On a worker, take over the results that its driver has collected."""
        results.adopt(self._module)


Framework = TrainerFramework | FabricFramework
"""What a run needs of the framework."""
