"""Drivers that are started late: when rank 0, which has begun the script alone, has chosen sizes.

Where this package starts the processes and sizes are left open, all other ranks are servers at
first. If several replicas are chosen, their drivers take the places of some servers: the script is
started for them when rank 0 stands in the set-up of its run. Up to there they follow rank 0: their
barriers are passed, and broadcasts give what rank 0 has broadcast there.
"""

import pickle
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_hybrid.comm import Failure
from lightning_hybrid.errors import RemoteError
from lightning_hybrid.planning import Sizes
from lightning_hybrid.process.children import have_met
from lightning_hybrid.process.joining import History
from lightning_hybrid.process.world import NoWorld, Phase

T = TypeVar("T")
_KEY, _FAILURE = "choice", "failure of a late driver"
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a driver that is started late has to know; rank 0 leaves it in the store.

    Attributes:
        sizes: numbers of replicas, stages and micro-batches.
        servers: global ranks that stay servers.
        history: which groups rank 0 has.
        said: what rank 0 has broadcast so far, in this order.
    """

    sizes: Sizes
    servers: frozenset[int]
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
        store: the store of all ranks.
    """

    phase = Phase.LATE

    def __init__(self, choice: Choice, store: Any) -> None:
        self.choice = choice
        self._said, self._store = iter(choice.said), store

    def come(self, rank: int) -> None:
        """Tell rank 0 that this driver is about to join.

        Args:
            rank: global rank of this driver.
        """
        self._store.set(_here(rank), "")

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """Tell rank 0 that this driver has failed before it could join.

        Args:
            error: what this rank has raised.
            rank: name of this rank in messages.
        """
        self._store.set(_FAILURE, Failure.of(error, rank).to_json())
        return None

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return what rank 0 has broadcast here.

        Args:
            value: value of this rank; returned if rank 0 has made no more broadcasts.
            source: not used: rank 0 was alone.
        """
        same: T = next(self._said, value)
        return same


def wait_for_late_drivers(
    store: dist.Store, processes: Mapping[int, "subprocess.Popen[bytes]"]
) -> None:
    """On rank 0, wait until the drivers that it has started are about to join.

    If one of them fails before, all of them are killed: they cannot take part in a later run.

    Args:
        store: the store of all ranks.
        processes: their processes, by global rank.

    Raises:
        Exception: the error of a driver that has failed.
        RemoteError: a driver has ended before it was about to join.
    """
    keys = [_here(rank) for rank in processes]
    try:
        while not store.check(keys):
            if store.check([_FAILURE]):
                raise Failure.from_json(store.get(_FAILURE).decode()).exception()
            for rank, process in processes.items():
                if process.poll() is not None and not store.check([_FAILURE]):
                    raise RemoteError(
                        f"Rank {rank}, on which the script was started for another replica (PID "
                        f"{process.pid}), has ended with code {process.returncode} before its "
                        "first run. Its own error, if it had one, stands above. Each rank must "
                        "come to the same runs; data_parallel_size=1 needs no second script."
                    )
            time.sleep(_LOOK_EVERY_S)
    except BaseException:
        for process in processes.values():
            process.kill()
        have_met()  # (nobody else needs to end them)
        raise


def _here(rank: int) -> str:
    return f"late driver {rank}"
