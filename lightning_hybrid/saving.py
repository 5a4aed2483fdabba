"""What Lightning asks a strategy about checkpoints: those of one device, whatever rank has what."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid._lightning import CheckpointIO, LightningOptimizer
from lightning_hybrid.building import BetweenRuns, WholeModule
from lightning_hybrid.checkpoints import with_atomic_writes
from lightning_hybrid.steps import SteppingStrategy
from lightning_hybrid.world import NoWorld


class SavingStrategy(SteppingStrategy):
    """Weights and states are gathered to be saved, and handed out when they are loaded."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, else one that writes a file whole or not at all."""
        self._checkpoint_io = io = with_atomic_writes(self._checkpoint_io)
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
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

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._session.loading(self._module):
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(self._driving.optimizer_states(checkpoint))

    def __getstate__(self) -> dict[str, Any]:
        """Without groups and links: a Trainer can be pickled after a run, and spawned with."""
        state: dict[str, Any] = super().__getstate__()
        ranks, building = NoWorld(), WholeModule()
        session = BetweenRuns(ranks, building)
        return state | {"_world": ranks, "_building": building, "_session": session}
