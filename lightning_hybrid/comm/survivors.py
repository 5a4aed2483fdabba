"""Replicas that go on in place when another one is lost (``BySpeed(on_loss="continue")``).

The averages of a step are taken by all ranks or by none. Each replica keeps its own gradients
beside the sums over the replicas. When all its ranks have their sums, its driver votes in the
store, and the last vote sets the decision of this step to *commit*: then all ranks write the
averages into their gradients. A driver that hears of a lost replica sets the decision instead, in
one atomic operation, to the replicas that are left: then all ranks of these make their groups anew
without the lost replica, and sum up again the gradients that they have kept. Weights, optimizers
and the user's code notice nothing but a smaller batch.

Only the launcher of rank 0, which has started the processes and sees a process end, says that a
replica is lost. A broken connection does not say so: a rank whose user code has raised an error
breaks its connections, too.
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
"""How many seconds a rank with a broken connection waits for the news that a replica is lost, or
that a rank has failed."""


@contextmanager
def _asking() -> Iterator[None]:
    """Context (and decorator) of requests to the store.

    Raises:
        ConnectionLost: the process that has the store is gone.
    """
    try:
        yield
    except ConnectionLost:
        raise
    except RuntimeError as error:
        raise connection_lost("rank 0", error) from None


class Survivors:
    """The replicas that are left in a run, as one rank knows them.

    All ranks make it at the same place in the program. Replicas are numbered by ``dp_rank``. In
    each step drivers call :meth:`begin_total`, :meth:`has_total` and :meth:`agree`; all ranks call
    :meth:`start` and :meth:`has_ended` for their sums, and, after a loss, :meth:`go_on_with`.

    Args:
        here: coordinates of this rank.
        store: store that all ranks share.
        drivers: the group of the drivers; ``None`` on workers.
        run: name of the run, equal on all ranks, and other than that of earlier runs.
        timeout: time-out of the groups.
        renew: makes the groups over replicas anew, with the replicas whose numbers it gets.

    Attributes:
        living: numbers of the replicas that are left, in rising order.
        weight: on a driver, set before a step's averages: weight of this replica's batch in the
            global batch, a factor of this replica's loss.
        told_to_end: on a driver, set before a step's averages: whether this driver was told to end
            (SIGTERM). After :meth:`agree`: whether any driver was, so that all end in the same
            step.
        on_loss: called on each rank after a loss, when the other replicas go on, with the numbers
            of the lost ones. By default it does nothing.
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
        """Tell all ranks that the replicas of some ranks are lost; only on global rank 0.

        Its launcher calls it, in another thread than the main one.

        Args:
            ranks: global ranks of processes that have ended with an error.

        Returns:
            All global ranks of these replicas, whose processes the caller must end. ``None``: the
            others cannot go on, so the run ends: training is over, a rank has failed, replica 0 is
            among them, or groups are being made anew.
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
        """Note that training is over: from now on the loss of a replica ends the run."""
        self._over = True

    # ------------------------------------------------------------------ what is known

    def _has_failed(self) -> bool:
        return self._faults.check([FAULT])

    def _known(self) -> set[int]:
        """Ask the store which replicas were ever lost in this run."""
        if not self._store.check([_LOST]):
            return set()
        return set(map(int, self._store.get(_LOST).decode().split()))

    def _lost(self) -> set[int]:
        """Ask the store which of the replicas in :attr:`living` are lost."""
        return self._known() & set(self.living)

    def _must_stop(self) -> bool:
        """Whether to give up a sum: a replica is lost, or a rank has failed.

        Asks the store once in `_LOOK_EVERY_S` seconds; in between false.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now
        return bool(self._lost()) or self._has_failed()

    def await_end(self) -> None:
        """On a rank that has lost a peer: wait for the launcher, which ends lost replicas.

        If this rank's replica is lost, its process is ended here; a report of this rank would be
        taken for a failure of the run. Returns when a failure is in the store, or after
        `_VERDICT_S` seconds; at once in replica 0 and after :meth:`end`.
        """
        until = time.monotonic() + _VERDICT_S
        protected = self._over or self._here.dp_rank == 0
        with suppress(RuntimeError):  # rank 0, whose process has the store, is gone
            while not protected and time.monotonic() < until and not self._has_failed():
                time.sleep(_LOOK_EVERY_S)

    # ------------------------------------------------------------------ sums

    def start(self, group: Group, tensor: Tensor) -> dist.Work | None:
        """Begin to sum up a tensor, in place, over a group, whose ranks call this together.

        Args:
            group: group of ranks of all replicas.
            tensor: the tensor, on the device of the group.

        Returns:
            What :meth:`has_ended` waits for; ``None``: a rank of the group is lost.
        """
        try:
            return start(group.allreduce, [tensor], peer=ANOTHER_REPLICA)
        except ConnectionLost:
            return None

    @_asking()
    def has_ended(self, work: dist.Work | None) -> bool:
        """Wait for the end of a sum. Returns whether it is complete.

        Also ends, with false, when the store says that a replica is lost or a rank has failed. A
        wait of the backend would end only if a neighbour in its ring is lost.

        Args:
            work: what :meth:`start` has returned; for ``None`` the result is false at once.
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
        """On a driver: begin to sum up :attr:`weight` and :attr:`told_to_end` of all drivers.

        All drivers call it together. Does not wait.
        """
        # (a new tensor: an older sum that was given up may still be under way)
        self._total = torch.tensor([self.weight, self.told_to_end], dtype=torch.float64)
        self._work = self.start(self._drivers, self._total)

    def has_total(self) -> bool:
        """Wait for the sum of :meth:`begin_total`. Returns whether it is complete."""
        return self.has_ended(self._work)

    @property
    def scale(self) -> float:
        """Factor for averages of gradients that each replica has multiplied by its :attr:`weight`.

        It makes of the average over the replicas the weighted mean. 0 if all weights are 0. Valid
        on a driver, after :meth:`has_total` has returned true.
        """
        total = self._total[0].item()
        return len(self.living) / total if total else 0.0

    # ------------------------------------------------------------------ the decision

    @_asking()
    def agree(self, *, complete: bool) -> tuple[int, ...] | None:
        """Decide with the other drivers whether the averages of this step are valid.

        All drivers call it together, after :meth:`has_total`.

        Args:
            complete: whether all ranks of this replica have all their sums.

        Returns:
            ``None``: they are valid. Else the numbers of the replicas that are left: all their
            ranks must call :meth:`go_on_with`, and sum up again.

        Raises:
            ConnectionLost: a rank is gone, or does not answer, and the store does not say that a
                replica is lost.
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
            # (not the store's own wait, which prints lines whenever it times out)
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONG_NAP_S)
        decision = self._store.get(key).decode()
        if decision != _COMMIT:
            return tuple(map(int, decision.split()))
        self._average += 1
        self.told_to_end = bool(self._total[1])
        return None

    def go_on_with(self, living: Sequence[int]) -> None:
        """Go on without the lost replicas: make new groups, and set :attr:`living`.

        Calls :attr:`on_loss` at the end. All ranks of the replicas that are left call this
        together.

        Args:
            living: numbers of the replicas that are left.

        Raises:
            ConnectionLost: one of ``living`` is lost, too.
        """
        lost = set(self.living) - set(living)
        self._meeting = True  # a loss in this moment ends the run: the others wait for the lost one
        if self._known() & set(living):
            raise ConnectionLost(f"Lost {ANOTHER_REPLICA} while the others went on without one.")
        self._renew(living)
        self.living = tuple(living)
        self._meeting = False
        self.on_loss(lost)
