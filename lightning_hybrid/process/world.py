"""The ranks of a run, and which of them barriers and broadcasts are over at a time.

Barriers and broadcasts are over the drivers, during a run by Lightning's own code. Where sizes are
left open, ranks have no coordinates until ``setup``: up to there all of them run the script.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import TypeVar

from torch import nn

from lightning_hybrid.comm import (
    SENDS,
    Coordinates,
    Failure,
    Group,
    Mesh,
    broadcast_object,
    gather_objects,
    make_deferrable,
    meet,
    run_pending,
)
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Cluster
from lightning_hybrid.process.children import Children
from lightning_hybrid.process.faults import (
    FaultWatchdog,
    first_fault,
    is_loss,
    read_fault,
    say_at_next_meeting,
    tell_lost,
)
from lightning_hybrid.process.joining import Everyone, Joined, forget, meet_all
from lightning_hybrid.stage import tensors_of

T = TypeVar("T")


class Phase(Enum):
    """Which ranks take part in a barrier or a broadcast at a time; the values say it in words."""

    APART = "nobody: this process has no groups yet"
    TOGETHER = "all that run the script: before the setup of a run, and after its end"
    CHOOSING = "nobody: rank 0 looks at the network, and the others wait for what it says"
    RUNNING = "the drivers"
    SERVING = "nobody: a worker hears its driver alone"
    ALONE = "nobody: this driver handles a signal, and others may wait for it"
    FAILED = "nobody: the others may be gone"


class World:
    """The ranks of a run: barriers, broadcasts and failures.

    Args:
        everyone: the meeting of all ranks.
        timeout: how long a rank waits for one that has stopped.

    Attributes:
        everyone: the meeting of all ranks.
        phase: which ranks take part in barriers and broadcasts now.
    """

    def __init__(self, everyone: Everyone, timeout: timedelta) -> None:
        self.everyone, self.phase = everyone, Phase.TOGETHER
        self._joined: Joined | None = None
        self._has_heard = False  # whether a meeting has told of a failure
        self._watch = FaultWatchdog(self.coordinates, everyone.store, timeout)

    def begin(self) -> None:
        """Watch for failures of other ranks, and meet all of them at the start of a run.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        Children.lose = self._lose
        self._watch.start()
        if self.everyone.world.is_open:
            self._meet_all("the start of a run")
        else:
            meet_all(self.everyone)

    def take_coordinates(self, joined: Joined) -> None:
        """Take the mesh, and with it the coordinates of this rank, when sizes are known."""
        self._joined = joined

    @property
    def has_coordinates(self) -> bool:
        """Whether ranks have coordinates in a mesh."""
        return self._joined is not None

    @property
    def joined(self) -> Joined:
        """The mesh that this rank has joined.

        Raises:
            HybridError: sizes are not known yet.
        """
        if self._joined is None:
            raise HybridError(
                "The numbers of replicas and stages are chosen when the run is set up, after the "
                "setup and configure_model hooks: until then no rank has coordinates. Ask for this "
                "in a later hook, or give data_parallel_size and pipeline_parallel_size."
            )
        return self._joined

    @property
    def mesh(self) -> Mesh:
        """The process groups of this rank."""
        return self.joined.mesh

    @property
    def cluster(self) -> Cluster | None:
        """The devices of all ranks; ``None``: there was no survey."""
        return self.joined.cluster

    @property
    def _all(self) -> Mesh | Everyone:
        """All ranks, with the coordinates of this one."""
        return self._joined.mesh if self._joined else self.everyone

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank; they may change when the mesh is joined."""
        return self._all.coordinates

    def survive(self, *, survives: bool) -> None:
        """Say before a run whether replicas go on in it when one is lost."""
        self.mesh.survive(survives=survives)

    def _lose(self, children: Collection[int]) -> set[int] | None:
        """Hear from the launcher of ranks that have ended with an error; see :class:`Children`."""
        lost = [self.everyone.coordinates.rank + number for number in children]
        survivors = self.mesh.survivors if self._joined is not None else None
        given_up = survivors.lose(lost) if survivors is not None else None
        if given_up is None:
            tell_lost(self._all, lost)
        return given_up

    def barrier(self, name: str = "") -> None:
        """Wait for all that run the script, in phase TOGETHER; else do nothing.

        Args:
            name: name of the barrier.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        if self.phase is Phase.TOGETHER:
            self._meet(f"barrier({name!r})")

    def broadcast(self, value: T, source: int = 0) -> T:
        """Broadcast the value of one rank in phase TOGETHER; else return that of this rank.

        Args:
            value: value of this rank.
            source: ``global_rank`` of the rank whose value all get.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        if self.phase is not Phase.TOGETHER:
            return value
        self._meet("a broadcast")
        # `source` is a number of the user's world, in which drivers come first
        numbers = [replace(self.coordinates, rank=rank).lightning_rank for rank in self._scripts()]
        same: T = broadcast_object(self._group, value, numbers.index(source))
        return same

    def gather(self, value: T, place: str) -> list[T]:
        """The values of all ranks that run the script, in phase TOGETHER.

        Args:
            value: value of this rank.
            place: name of the place in the program.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        self._meet(place)
        return gather_objects(self._group, value)

    def shared_names(self, module: nn.Module) -> frozenset[str]:
        """Names of the parameters and buffers that a module has on all drivers.

        One may have others, which the module's ``forward`` has registered in an earlier run.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        names = self.gather(sorted(tensors_of(module)), "the setup of a run")
        return frozenset.intersection(*map(frozenset, names))

    def end_run(self) -> None:
        """Wait for all ranks at the end of a run, and enter phase TOGETHER.

        One replica may predict for longer than the others, and rank 0, whose store they need, must
        not end before them.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        self.phase = Phase.TOGETHER
        self._meet_all("the end of a run")
        self.stop_watching()

    def _ranks(self) -> Sequence[int]:
        """The numbers of all ranks that are left."""
        return self.mesh.living_ranks() if self._joined else range(self.everyone.world.size())

    def _scripts(self) -> Sequence[int]:
        """The numbers of those that run the script."""
        here, drivers = self.coordinates, self._joined is not None
        return [r for r in self._ranks() if not drivers or replace(here, rank=r).is_driver]

    @property
    def _group(self) -> Group:
        """The group of those that run the script."""
        return self.mesh.scripts if self._joined else self.everyone.world

    def _meet(self, place: str) -> None:
        """Wait for all that run the script, and raise the first failure if one has failed."""
        self._wait(self._group, self._scripts(), place)

    def _meet_all(self, place: str) -> None:
        """Wait for all ranks, and raise the first failure if one has failed."""
        self._wait(self.everyone.world, self._ranks(), place)

    def _wait(self, group: Group, ranks: Sequence[int], place: str) -> None:
        names = {rank: str(replace(self.coordinates, rank=rank)) for rank in ranks}
        look = self._watch.wait_for(names, place)
        if not meet(group, place=place, look=look):
            self._has_heard = True
            raise read_fault(self.everyone.store).exception()

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside, on rank 0, phase CHOOSING: barriers and broadcasts do nothing."""
        self.phase = Phase.CHOOSING
        yield
        self.phase = Phase.TOGETHER  # not after an error, of which `fail` tells the others

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before, self.phase = self.phase, Phase.ALONE
        try:
            yield
        finally:
            self.phase = before

    def defer_signals(self) -> None:
        """Defer handlers of signals from now on while messages are exchanged.

        While a handler runs, this rank is in phase ALONE: the other drivers may wait for it.
        """
        make_deferrable(self._alone)
        run_pending(hold=False)

    def serve(self) -> None:
        """Enter phase SERVING: this server hears of failures from its driver."""
        self.phase = Phase.SERVING
        self._watch.serve()

    def stop_watching(self) -> None:
        """End the watch that kills this process after a failure elsewhere: it ends by itself."""
        self._watch.close()
        SENDS.close()

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """Tell the other ranks that this one has failed.

        Args:
            error: what this rank has raised.
            rank: name of this rank in messages.

        Returns:
            The failure of another rank that came first; ``None``: this one is the first.
        """
        self.stop_watching()
        if self._joined and self.mesh.survivors is not None and is_loss(error):
            self.mesh.survivors.await_end()
        # this error may be a consequence of another rank's, which is then in the store
        first = first_fault(self._all, error, rank)
        # others wait for this rank at the next meeting, unless it has heard of the failure at one
        together = self.phase in (Phase.TOGETHER, Phase.CHOOSING) and not self._has_heard
        if together and not is_loss(error):
            say_at_next_meeting(self._group)
        self.phase = Phase.FAILED
        return first

    def leave(self) -> None:
        """After a failure, close the groups of the mesh, which wakes waiting ranks."""
        self.phase = Phase.FAILED
        forget()


class NoWorld:
    """Stands for `World` before the first run of a process, which has no groups yet."""

    phase = Phase.APART
    has_coordinates = False

    def barrier(self, name: str = "") -> None:
        """Return at once."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of this rank."""
        return value

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """The failure of another rank that ``error`` stands for, or ``None``; no rank is told."""
        return first_fault(None, error, rank)

    def leave(self) -> None:
        """Give up the mesh of an earlier Trainer, if there is one."""
        forget()
