"""What Lightning asks a strategy about checkpoints: those of one device, whatever rank has what."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid._lightning import CheckpointIO, LightningOptimizer
from lightning_hybrid.config import Config
from lightning_hybrid.errors import PlanError
from lightning_hybrid.run import BetweenRuns, DriverSession, NoWorld, Phase, WholeModule
from lightning_hybrid.state import (
    ShardedSaves,
    is_sharded,
    let_go_of_checkpoints,
    with_atomic_writes,
)
from lightning_hybrid.strategy.refusals import refuse_checkpoint_io
from lightning_hybrid.strategy.steps import SteppingStrategy


class SavingStrategy(SteppingStrategy):
    """Weights and states are gathered to be saved, and handed out when they are loaded.

    Args:
        config: what the user has asked for.
        checkpoint_io: the user's.
        lightning: further arguments of ``DDPStrategy``.
    """

    def __init__(
        self, config: Config, checkpoint_io: CheckpointIO | None = None, **lightning: Any
    ) -> None:
        super().__init__(config, **lightning)
        self.checkpoint_io = checkpoint_io
        self._saves = ShardedSaves()

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else one that writes a file whole or not at all."""
        self._checkpoint_io = io = with_atomic_writes(self._checkpoint_io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        refuse_checkpoint_io(io, self._config.checkpoint)
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's, on the driver of replica 0; the others have nothing to save."""
        return self._session.state_dict(self._module, here=self.is_global_zero)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole LightningModule, on rank 0; empty on all other ranks.

        Needed for a network that is made in ``configure_model``: it is whole on no rank. Call it on
        all ranks: in a hook (which run on the drivers), or after ``fit``, ``validate``, ``test`` or
        ``predict``, where every rank has kept its stage.
        """
        return self._session.full_state_dict(self._module, here=self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As on one device, on the driver of replica 0. After a run all ranks call it together."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return self._session.optimizer_state(self._module, optimizer, here=self.is_global_zero)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """With a network that is whole on no rank, rank 0 alone reads, and all get the rest."""
        read = partial(super().load_checkpoint, checkpoint_path, weights_only)
        return self._building.read_checkpoint(read, self._world)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """A file from the driver of replica 0, or a folder to which all ranks of it write."""
        if self._config.checkpoint == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None or "://" in str(filepath):
            raise PlanError(
                f"checkpoint={self._config.checkpoint!r} cannot save to {str(filepath)!r}: each "
                "rank writes to a folder of a file system. Give such a path and no "
                "storage_options, or use checkpoint='full'."
            )
        later = self._config.checkpoint == "sharded_async" and self._world.phase is Phase.RUNNING
        if not self.is_global_zero:
            # where states are divided, other replicas write a part of them
            self._session.help_to_save_shards(checkpoint)
            return
        if later:
            self._saves.begin(self._driving, checkpoint, Path(filepath))
        else:
            self._saves.save(partial(self._session.save_shards, checkpoint), Path(filepath))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """A file or a folder."""
        if self._config.checkpoint == "full" and not is_sharded(filepath):
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            self._saves.remove(Path(filepath))

    def teardown(self) -> None:
        """Asynchronous checkpoints are there when a run has ended."""
        try:
            if isinstance(self._session, DriverSession):
                self._saves.finish(self._session)
        finally:
            super().teardown()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._session.loading(self._module):
            super().load_model_state_dict(checkpoint, strict=strict)
        let_go_of_checkpoints()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(self._driving.optimizer_states(checkpoint))

    def __getstate__(self) -> dict[str, Any]:
        """Without groups and links: a Trainer can be pickled after a run, and spawned with."""
        state: dict[str, Any] = super().__getstate__()
        ranks, building = NoWorld(), WholeModule()
        session = BetweenRuns(ranks, building)
        return state | {"_world": ranks, "_building": building, "_session": session}
