"""Who has the weights of the LightningModule while it is built, restored and saved.

A network that is made in ``__init__`` is whole on every driver before a run. One that is made in
``configure_model`` is whole on no rank: the driver notes down how weights are made or loaded, and
makes each as it sends it to its owner; see :mod:`lightning_hybrid.remote.deferred`.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid._lightning import (
    Callback,
    LightningModule,
    Trainer,
    WeightAveraging,
)
from lightning_hybrid._lightning_private import set_module_device
from lightning_hybrid.comm import Failure
from lightning_hybrid.process import NoWorld, World
from lightning_hybrid.remote import DeferredMaker, is_deferred
from lightning_hybrid.stage import with_room_for
from lightning_hybrid.state import (
    having_all,
    optimizer_after_run,
    placed,
    save_alone,
    without_frozen,
)


class Building:
    """Whether a driver makes all weights of the module at once, or each as its owner needs it.

    Args:
        deferral: puts off what is done to weights; ``None``: all are made as on one device.
    """

    def __init__(self, deferral: DeferredMaker | None = None) -> None:
        self._deferral = deferral

    @property
    def deferred(self) -> bool:
        """Whether weights are made when their owners need them."""
        return self._deferral is not None

    def deferred_if_apart(self, trainer: Trainer, device: torch.device, stages: int) -> "Building":
        """What takes its place in ``configure_model``, where weights may be made later.

        Args:
            trainer: Lightning's.
            device: where one device would make them.
            stages: number of devices of a replica.
        """
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # a callback that averages weights needs all of them on its rank
        averages = any(isinstance(callback, WeightAveraging) for callback in callbacks)
        # (once deferred, they stay so)
        if self.deferred or averages or stages == 1:
            return self
        return Building(DeferredMaker(device))

    def building(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, what is done to weights that are not made yet is noted down."""
        return nullcontext() if self._deferral is None else self._deferral.building(module)

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, weights of a checkpoint are left in its file until stages are made.

        Args:
            module: the LightningModule.
        """
        if self._deferral is None:
            return nullcontext()
        return self._deferral.loading(module)


class BetweenRuns:
    """Before the first run, and after each: nothing is driven, and ranks call things together.

    Args:
        ranks: all ranks.
        building: who has the weights of the module.
        divided: whether states of optimizers are divided over the replicas.
    """

    def __init__(
        self,
        ranks: World | NoWorld,
        building: Building,
        *,
        divided: bool = False,
    ) -> None:
        self._ranks = ranks
        self._building = building
        self._divided = divided

    def fence(self) -> None:
        """No replica is ahead of the others."""

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside, weights are written to the module, on all ranks."""
        return self._building.loading(module)

    def state_dict(self, module: nn.Module, *, here: bool) -> dict[str, Any]:
        """The state dict of the whole module.

        Args:
            module: the LightningModule.
            here: whether this rank is the one that gets it; the others get nothing.
        """
        if self._building.deferred:
            return self.full_state_dict(module, here=here)
        return module.state_dict() if here else {}

    def full_state_dict(
        self, module: nn.Module, *, here: bool, frozen: bool = True
    ) -> dict[str, Any]:
        """The state of the module with the weights of all ranks, which call this together.

        Args:
            module: the LightningModule.
            here: whether this rank gets the state; else it is empty.
            frozen: whether parameters that require no gradient are in it.
        """
        if not here:
            return {}
        # state dicts are made by hooks of the user's too, which want to see all weights
        with having_all(module):
            state = module.state_dict()
        return state if frozen else without_frozen(module, state)

    def optimizer_state(
        self, module: nn.Module, optimizer: Optimizer, *, here: bool
    ) -> dict[str, Any]:
        """The state dict of one device, with what other replicas hold; drivers call it together."""
        if isinstance(self._ranks, World):
            drivers = self._ranks.mesh.drivers
            state = optimizer_after_run(optimizer, drivers, divided=self._divided)
        else:
            state = optimizer.state_dict()
        return state if here else {}

    def save_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """Write a sharded checkpoint: what other ranks have is mapped here, or was gathered."""
        save_alone(checkpoint, folder)

    def help_to_save_shards(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: replica 0 has brought together what there is."""

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Tell the other ranks of the replica: a worker may serve before its driver has a run."""
        if isinstance(self._ranks, World) and self._ranks.has_coordinates:
            self._ranks.mesh.say_goodbye(failure)

    def abort(self) -> None:
        """Do nothing: :meth:`fail` has told the others."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def move_module(module: nn.Module, device: torch.device, *, all_of_it: bool) -> None:
    """Bring a module to the device of its rank.

    Args:
        module: the LightningModule, or a model of Fabric.
        device: of this rank.
        all_of_it: else where a GPU has not twice its size free, or some of it has no memory yet,
            only what no network can own moves, and modules with parameters wait on the CPU until
            they are called for the first time.
    """
    # until stages are known all weights would be on this one device
    waits = device.type == "cpu" or with_room_for(module, device) != device
    waits = waits or any(map(is_deferred, (*module.parameters(), *module.buffers())))
    if all_of_it or not waits:
        module.to(device)
        return
    for part in module.modules():
        if part is not module and next(part.parameters(), None) is None:
            part.to(device)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        # the same objects: optimizers and the user's code refer to them
        tensor.data = tensor.data.to(device)
    if isinstance(module, LightningModule):
        set_module_device(module, device)


def leave_on_cpu(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """After a run: what was trained is whole on the CPU, with the states of its optimizers."""
    module.cpu()
    for optimizer in optimizers:
        states: dict[nn.Parameter, dict[str, Any]] = optimizer.state  # type: ignore[assignment]
        for parameter, state in states.items():
            states[parameter] = placed(state, parameter)
