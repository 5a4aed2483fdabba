"""Drivers that are started late: when rank 0, which has begun the script alone, has chosen sizes.

Where this package starts the processes and sizes are left open, all other ranks are servers at
first. If several replicas are chosen, their drivers take the places of some servers: the script is
started for them when rank 0 stands in the set-up of its run. Up to there they follow rank 0: their
barriers are passed, and broadcasts give what rank 0 has broadcast there.
"""

import pickle
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_hybrid.planning import Machine, Sizes
from lightning_hybrid.process.joining import History
from lightning_hybrid.process.world import NoWorld, Phase

T = TypeVar("T")
_KEY = "choice"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a driver that is started late has to know; rank 0 leaves it in the store.

    Attributes:
        sizes: numbers of replicas, stages and micro-batches.
        servers: global ranks that stay servers.
        machine: the surveyed devices.
        history: which groups rank 0 has.
        said: what rank 0 has broadcast so far, in this order.
    """

    sizes: Sizes
    servers: frozenset[int]
    machine: Machine
    history: History
    said: tuple[Any, ...]

    def leave(self, store: Any) -> None:
        """Leave the choice in the store of all ranks, before late drivers are started."""
        store.set(_KEY, pickle.dumps(self))

    @staticmethod
    def found(store: dist.Store) -> "Choice | None":
        """Return the choice that rank 0 has left in the store; ``None``: it has left none."""
        found: Choice | None = pickle.loads(store.get(_KEY)) if store.check([_KEY]) else None
        return found


class LateWorld(NoWorld):
    """Stands in for `World` in a driver that is started late, until it joins the other ranks.

    Args:
        choice: what rank 0 has left for it.
    """

    phase = Phase.LATE

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._said = iter(choice.said)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return what rank 0 has broadcast here.

        Args:
            value: value of this rank; returned if rank 0 has made no more broadcasts.
            source: not used: rank 0 was alone.
        """
        same: T = next(self._said, value)
        return same
