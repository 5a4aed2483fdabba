"""State dicts of the user's optimizers as one device has them, of the states of all ranks."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import Mesh, gather_objects, signals_deferred
from lightning_hybrid.driver.driven_optimizers import DrivenOptimizers
from lightning_hybrid.driver.optimizer_link import OptimizerLink
from lightning_hybrid.driver.weights import FilesOfWorkers
from lightning_hybrid.state import StatesByName, complete, gather_states, outlined


class OptimizerStateDicts:
    """Makes state dicts of optimizers that have the form of one device, and divides loaded ones.

    Args:
        optimizers: the optimizers of the run.
        mesh: the process groups of this rank.
        files: reads the files that workers write their states to.
        say: tells the user a line.
    """

    def __init__(
        self,
        optimizers: DrivenOptimizers,
        mesh: Mesh,
        files: FilesOfWorkers,
        say: Callable[[str], None],
    ) -> None:
        self._optimizers = optimizers
        self._mesh = mesh
        self._files = files
        self._say = say

    @signals_deferred
    def state_dict(self, optimizer: Optimizer, *, here: bool, unread: bool) -> dict[str, Any]:
        """The state dict that one device would have, with the states of all ranks.

        Where states are divided over the replicas, all drivers call this together.

        Args:
            optimizer: the user's optimizer.
            here: whether this rank gets the state dict; else it gets an empty one. Where states are
                divided it may be true on replica 0 alone, which gets those of the others.
            unread: whether tensors of workers stay there until they are read
                (:meth:`DrivenOptimizers.unread`).
        """
        all_of_them = self._optimizers
        divided = all_of_them.others
        link = self._link_of(optimizer) if divided is not None and all_of_them.links else None
        with all_of_them.unread() if unread else nullcontext():
            if divided is None or link is None or link.divided is None:
                return optimizer.state_dict() if here else {}
            # collective: every driver sends its states, and replica 0 alone has the whole
            others = self._states_of_others(link)
            if not here:
                return {}
            with divided.gathered():
                return complete(link.optimizer, optimizer.state_dict(), all_of_them.names, others)

    def of_this_rank(self, optimizer: Optimizer) -> dict[str, Any]:
        """After a run has failed: make the state dict of an optimizer from what this rank has.

        It has the form of one device. Where replicas divide its states it has none of them, since
        other replicas can be asked no more; the user is told so.
        """
        divided = self._optimizers.others
        if divided is None:
            return optimizer.state_dict()
        with divided.gathered():
            found = optimizer.state_dict()
        if self._link_of(optimizer).divided is None:
            return found
        self._say(
            "hybrid_gabra: the run has failed, and shard_states=True leaves each replica "
            f"a part of the states of {type(optimizer).__name__}: what is saved now has none of "
            "them, and a run that goes on from it begins with new ones."
        )
        return {**found, "state": {}}

    def share_of(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """The checkpoint without the states that other replicas are known to have.

        Loading moves states to the devices of their parameters, which may have no room for all.

        Args:
            checkpoint: a checkpoint with ``optimizer_states``; it is not changed.
        """
        others = self._optimizers.others
        if others is None:
            return checkpoint
        left = []
        for link, state in zip(self._optimizers.links, checkpoint["optimizer_states"]):
            if link.divided is None:  # (the state dict may be of any form that its class likes)
                left.append(state)
                continue
            numbers = [number for group in state["param_groups"] for number in group["params"]]
            parameters = [p for group in link.optimizer.param_groups for p in group["params"]]
            away = {number for number, p in zip(numbers, parameters) if others.have(p)}
            mine = {number: s for number, s in state["state"].items() if number not in away}
            left.append({**state, "state": mine})
        return {**checkpoint, "optimizer_states": left}

    def _link_of(self, optimizer: Optimizer) -> OptimizerLink:
        return self._optimizers.links[self._optimizers.index_of(optimizer)]

    def _states_of_others(self, link: OptimizerLink) -> StatesByName:
        """Bring the states that other replicas have to replica 0 (collective over the drivers).

        Args:
            link: the link of the optimizer.

        Returns:
            On the driver of replica 0, by name of the parameter its state by key: mapped from
            files; or unread tensors, where states stay with the workers. What others get is not
            used.
        """
        index = self._optimizers.links.index(link)
        mine = link.states_here() | ({} if link.is_back else self._optimizers.state(index))
        if not self._optimizers.stays:
            return gather_states(self._mesh.drivers, mine, self._files.folder)
        with as_they_are():
            outlines = {name: outlined(state) for name, state in mine.items()}
        everyones = gather_objects(self._mesh.drivers, outlines)
        return {
            name: self._optimizers.unread_state(index, replica, name, state)
            for replica, states in enumerate(everyones)
            for name, state in states.items()
            if replica
        }
