"""Replicas that go on in place when another one is lost (``BySpeed(on_loss="continue")``).

The averages of a step are taken by all ranks or by none. Each replica keeps its own gradients
beside the sums over the replicas. When all its ranks have their sums, its driver votes in the
store, and the last vote sets the decision of this step to *commit*: then all write the averages
into their gradients. A driver that hears of a lost replica instead sets the decision, in one atomic
operation, to the replicas that are left: then all of these make their groups anew without the lost
one, and sum up again from what they have kept. Weights, optimizers and the user's code notice
nothing but a smaller batch.

That a replica is lost is said by one place alone, the launcher of rank 0, which has started the
processes and sees one end. A connection that breaks says nothing: a rank whose user code has raised
an error breaks its connections, too.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.comm.connections import (
    ANOTHER_REPLICA,
    ConnectionLost,
    Group,
    connection_lost,
    start,
    wait,
)
from lightning_hybrid.comm.coordinates import Coordinates

FAULT = "fault"
"""Key of the store under which the first rank to fail writes its failure."""

_LOST, _COMMIT = "lost", "commit"
_LOOK_EVERY_S = 0.1
_NAP_S = 1e-4
_LONG_NAP_S = 5e-3
_VERDICT_S = 5.0
"""How long ranks with a broken connection wait for word of a lost replica, or of a failure."""


@contextmanager
def _asking() -> Iterator[None]:
    """Inside, the store is asked.

    Raises:
        ConnectionLost: its host is gone.
    """
    try:
        yield
    except ConnectionLost:
        raise
    except RuntimeError as error:
        raise connection_lost("rank 0", error) from None


class Survivors:
    """The replicas that are left, as one rank knows them. All ranks make it at the same place.

    Args:
        here: coordinates of this rank.
        store: that all ranks share.
        drivers: their group; ``None`` on workers.
        run: name of the run, equal on all ranks.
        timeout: time-out of the groups.
        renew: makes the groups over replicas anew, of the replicas that are left.

    Attributes:
        living: numbers of the replicas that are left.
        weight: what the batch of this replica weighs in the global batch; of drivers alone.
        told_to_end: of drivers: whether this one was told to end (SIGTERM); after the averages,
            whether any was, so that all end in the same step.
        on_loss: called on a driver when others are left, with the lost ones.
    """

    def __init__(
        self,
        here: Coordinates,
        store: dist.Store,
        drivers: Group,
        run: str,
        timeout: timedelta,
        renew: Callable[[Sequence[int]], None],
    ) -> None:
        self.living = tuple(range(here.replicas))
        self.weight = 1.0
        self.told_to_end = False
        self.on_loss: Callable[[Collection[int]], None] = lambda lost: None
        self._here = here
        self._faults = store
        self._renew = renew
        self._drivers = drivers
        self._store = dist.PrefixStore(f"survivors {run}", store)
        self._timeout_s = timeout.total_seconds()
        self._looked_s = 0.0
        self._average = 0
        self._meeting = self._over = False
        self._total = torch.zeros(2, dtype=torch.float64)
        self._work: dist.Work | None = None

    # ------------------------------------------------------------------ the launcher of rank 0

    def lose(self, ranks: Collection[int]) -> set[int] | None:
        """Say that replicas are lost, whose ranks have ended; called in a thread of rank 0.

        Args:
            ranks: numbers of processes that have ended with an error.

        Returns:
            The ranks of these replicas, which are to be ended; ``None``: the run ends.
        """
        replica_of = [
            replace(self._here, rank=rank).dp_rank
            for rank in range(self._here.replicas * self._here.ranks_per_replica)
        ]
        lost = {replica_of[rank] for rank in ranks}
        # replica 0 logs and saves, and the store ends with this process
        if self._over or self._meeting or self._has_failed() or lost & {0, self._here.dp_rank}:
            return None
        known = lost | self._known()
        self._store.set(_LOST, " ".join(map(str, sorted(known))))
        return {rank for rank, replica in enumerate(replica_of) if replica in lost}

    def end(self) -> None:
        """Training is over: from now on a lost rank ends the run."""
        self._over = True

    # ------------------------------------------------------------------ what is known

    def _has_failed(self) -> bool:
        return self._faults.check([FAULT])

    def _known(self) -> set[int]:
        """All replicas that were ever lost in this run."""
        if not self._store.check([_LOST]):
            return set()
        return set(map(int, self._store.get(_LOST).decode().split()))

    def _lost(self) -> set[int]:
        """Lost replicas that this rank still counts as living."""
        return self._known() & set(self.living)

    def _must_stop(self) -> bool:
        """Whether to wait no longer for a sum; asks the store now and then."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now
        return bool(self._lost()) or self._has_failed()

    def await_end(self) -> None:
        """On a rank that has lost a peer: wait for the launcher, which ends a lost replica.

        It would take what this rank reports for the failure of the run.
        """
        until = time.monotonic() + _VERDICT_S
        protected = self._over or self._here.dp_rank == 0
        with suppress(RuntimeError):  # rank 0, whose process has the store, is gone
            while not protected and time.monotonic() < until and not self._has_failed():
                time.sleep(_LOOK_EVERY_S)

    # ------------------------------------------------------------------ sums

    def start(self, group: Group, tensor: Tensor) -> dist.Work | None:
        """Begin to sum up a tensor over the replicas; ``None``: a replica is lost."""
        try:
            return start(group.allreduce, [tensor], peer=ANOTHER_REPLICA)
        except ConnectionLost:
            return None

    @_asking()
    def has_ended(self, work: dist.Work | None) -> bool:
        """Wait for the end of a sum. Returns whether it is complete.

        Unlike a wait inside of the backend this one ends when a replica is lost that is no
        neighbour of this one in the ring.
        """
        if work is None:
            return False
        while not work.is_completed():
            if self._must_stop():
                return False
            time.sleep(_NAP_S)
        try:
            wait(work, ANOTHER_REPLICA)
        except ConnectionLost:
            return False
        return True

    def begin_total(self) -> None:
        """Begin to sum up what the batches of all replicas weigh."""
        # (a new tensor: an older sum that was given up may still be under way)
        self._total = torch.tensor([self.weight, self.told_to_end], dtype=torch.float64)
        self._work = self.start(self._drivers, self._total)

    def has_total(self) -> bool:
        """Wait for that sum. Returns whether it is complete."""
        return self.has_ended(self._work)

    @property
    def scale(self) -> float:
        """What averages are multiplied with whose parts were weighted by :attr:`weight`."""
        total = self._total[0].item()
        return len(self.living) / total if total else 0.0

    # ------------------------------------------------------------------ the decision

    @_asking()
    def agree(self, *, complete: bool) -> tuple[int, ...] | None:
        """Decide with the other drivers whether the averages of this step hold.

        Args:
            complete: whether all ranks of this replica have all their sums.

        Returns:
            ``None``: they hold. Else the replicas that are left, which sum up again.

        Raises:
            ConnectionLost: a rank is gone, or does not answer, and no replica is said to be lost.
        """
        key = f"{self._average} {len(self.living)}"
        if complete and self._store.add(f"{key} votes", 1) == len(self.living):
            self._store.compare_set(key, "", _COMMIT)
            if self._average:  # everyone has read the decision before this one
                before = f"{self._average - 1} {len(self.living)}"
                self._store.delete_key(before)
                self._store.delete_key(f"{before} votes")
        until = time.monotonic() + (self._timeout_s if complete else _VERDICT_S)
        nap_s = _NAP_S
        while not self._store.check([key]):
            if self._must_stop() or time.monotonic() > until:
                lost = self._lost()
                if not lost:
                    raise ConnectionLost(f"Lost {ANOTHER_REPLICA} while gradients were averaged.")
                left = (replica for replica in self.living if replica not in lost)
                self._store.compare_set(key, "", " ".join(map(str, left)))
                continue
            # (no wait of the store's own, which prints lines whenever it ends in vain)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONG_NAP_S)
        decision = self._store.get(key).decode()
        if decision != _COMMIT:
            return tuple(map(int, decision.split()))
        self._average += 1
        self.told_to_end = bool(self._total[1])
        return None

    def go_on_with(self, living: Sequence[int]) -> None:
        """Make new groups over replicas; all ranks of the replicas that are left call this.

        Raises:
            ConnectionLost: another one of them is lost.
        """
        lost = set(self.living) - set(living)
        self._meeting = True  # who is lost in this moment ends the run: others wait for it
        if self._known() & set(living):
            raise ConnectionLost(f"Lost {ANOTHER_REPLICA} while the others went on without one.")
        self._renew(living)
        self.living = tuple(living)
        self._meeting = False
        self.on_loss(lost)
