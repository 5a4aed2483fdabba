"""How the weights of the LightningModule are made, loaded and saved before and after runs.

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
    """How the weights of the LightningModule are made: all at once, or each for its owner later.

    Args:
        deferral: records what is done to weights, and does it when an owner needs them; ``None``:
            all are made at once, as on one device.
    """

    def __init__(self, deferral: DeferredMaker | None = None) -> None:
        self._deferral = deferral

    @property
    def deferred(self) -> bool:
        """Whether weights are made later, when the ranks that own them need them."""
        return self._deferral is not None

    def deferred_if_apart(self, trainer: Trainer, device: torch.device, stages: int) -> "Building":
        """Return the building for ``configure_model``: one that makes weights later, if possible.

        It is not possible with one stage, or with a callback that averages weights. Then this
        building itself is returned, as it is if it is deferred already.

        Args:
            trainer: the Trainer, for its callbacks.
            device: device on which a run on one device would make the weights.
            stages: number of devices of a replica.
        """
        # (once deferred, they stay so)
        if self.deferred or averages_weights(trainer) or stages == 1:
            return self
        return Building(DeferredMaker(device))

    def building(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the user's hooks build a module.

        Where weights are made later, new ones get no memory in it, and what is done to them is
        noted down. Otherwise the context does nothing.

        Args:
            module: the LightningModule.
        """
        return nullcontext() if self._deferral is None else self._deferral.building(module)

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a checkpoint is loaded into a module.

        Where weights are made later, those of the checkpoint stay in its file until their owners
        need them. Otherwise the context does nothing.

        Args:
            module: the LightningModule.
        """
        if self._deferral is None:
            return nullcontext()
        return self._deferral.loading(module)


def averages_weights(trainer: Trainer) -> bool:
    """Whether a callback averages weights, so that it needs all of them on its own rank."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, WeightAveraging) for callback in callbacks)


class BetweenRuns:
    """Stands in for a `DriverSession` before the first run and after each one.

    It has those methods of a session that may be called then. Ranks call them together.

    Args:
        ranks: all ranks.
        building: how the weights of the module are made.
        divided: whether the last run has divided states of optimizers over the replicas.
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
        """Do nothing: between runs no replica is ahead of the others."""

    def loading(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which weights are loaded into a module; see :meth:`Building.loading`.

        Args:
            module: the LightningModule, or a model of Fabric.
        """
        return self._building.loading(module)

    def state_dict(self, module: nn.Module, *, here: bool) -> dict[str, Any]:
        """Return the state dict of the whole module, or an empty one.

        Unlike :meth:`full_state_dict`, it makes no weights that have no numbers here yet, unless
        the network is made in ``configure_model``; then both do the same.

        Args:
            module: the LightningModule, or a model of Fabric.
            here: whether this rank gets the state; else it is empty.
        """
        if self._building.deferred:
            return self.full_state_dict(module, here=here)
        return module.state_dict() if here else {}

    def full_state_dict(
        self, module: nn.Module, *, here: bool, frozen: bool = True
    ) -> dict[str, Any]:
        """Return the state dict of the whole module, with the numbers of all weights.

        Those that have no memory here yet are made for it, and the module stays as it is.

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
        """Return the state dict of an optimizer as on one device (collective over the drivers).

        It includes states that other replicas hold.

        Args:
            module: not used.
            optimizer: the optimizer.
            here: whether this rank gets the state; else it is empty.
        """
        if isinstance(self._ranks, World):
            drivers = self._ranks.mesh.drivers
            state = optimizer_after_run(optimizer, drivers, divided=self._divided)
        else:
            state = optimizer.state_dict()
        return state if here else {}

    def save_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """Write a sharded checkpoint, all of it from this rank.

        Args:
            checkpoint: the ordinary checkpoint, with the weights and states of all ranks.
            folder: an empty folder.
        """
        save_alone(checkpoint, folder)

    def help_to_save_shards(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: between runs replica 0 writes all of a checkpoint."""

    def fail(self, failure: Failure, error: BaseException) -> None:
        """Tell the other ranks of this replica that it has failed.

        A worker of the replica may serve already, though this driver is in no run yet.

        Args:
            failure: what came first.
            error: what was raised on this rank.
        """
        if isinstance(self._ranks, World) and self._ranks.has_coordinates:
            self._ranks.mesh.say_goodbye(failure)

    def abort(self) -> None:
        """Do nothing: :meth:`fail` has told the other ranks already."""

    def close(self) -> None:
        """Do nothing: between runs there is nothing to close."""


def move_module(module: nn.Module, device: torch.device, *, all_of_it: bool) -> None:
    """Move a module to the device of this rank, or only what cannot be part of a network.

    Args:
        module: the LightningModule, or a model of Fabric.
        device: device of this rank.
        all_of_it: ``True``: move all of it. ``False``: if the device is a GPU without twice the
            module's size free, or a CPU, or if some tensors have no memory yet, move only
            submodules without parameters and tensors that belong to ``module`` itself; the rest
            stays where it is until its network is cut. Otherwise move all of it.
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
    """Move a module, and the states of its optimizers, to the CPU after a run.

    Args:
        module: the module.
        optimizers: its optimizers.
    """
    module.cpu()
    for optimizer in optimizers:
        states: dict[nn.Parameter, dict[str, Any]] = optimizer.state  # type: ignore[assignment]
        for parameter, state in states.items():
            states[parameter] = placed(state, parameter)
