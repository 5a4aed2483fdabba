"""The ranks of a run: who takes part in barriers and broadcasts, and how failures are told.

Barriers and broadcasts are over the ranks that run the script. These are the drivers. Where sizes
are left open, they are rank 0 alone, or all ranks if a cluster's launcher has started the script on
all, up to the setup of a run, when ranks get coordinates. During a run
Lightning's own code makes barriers and broadcasts over the drivers.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

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
from lightning_hybrid.process.first_fault import (
    first_fault,
    is_loss,
    read_fault,
    say_at_next_meeting,
    tell_lost,
)
from lightning_hybrid.process.joining import Everyone, Joined, forget, meet_all
from lightning_hybrid.process.watchdogs import FaultWatchdog
from lightning_hybrid.stage import tensors_of

T = TypeVar("T")


class Phase(Enum):
    """States of a process, by which ranks take part with it in a barrier or broadcast.

    The values say it in words.
    """

    APART = "nobody: this process has no groups yet"
    TOGETHER = "all that run the script: before the setup of a run, and after its end"
    LONE = "nobody: rank 0 alone runs the script until sizes are chosen"
    LATE = "nobody: this script was started when sizes were chosen, and follows that of rank 0"
    CHOOSING = "nobody: rank 0 looks at the network, and the others wait for what it says"
    RUNNING = "the drivers"
    SERVING = "nobody: a worker hears its driver alone"
    ALONE = "nobody: this driver handles a signal, and others may wait for it"
    FAILED = "nobody: the others may be gone"


class World:
    """The ranks of a run, for barriers and broadcasts over them, and to tell them of failures.

    Args:
        everyone: what this rank has of the meeting of all ranks.
        timeout: how long a rank that others wait for may show no sign of life.

    Attributes:
        everyone: as given.
        phase: which ranks take part with this rank in barriers and broadcasts now.
        said: what was broadcast in phase LONE, for drivers that are started later.
    """

    def __init__(self, everyone: Everyone, timeout: timedelta) -> None:
        self.everyone, self.phase = everyone, Phase.TOGETHER
        self.said: list[Any] = []
        self._joined: Joined | None = None
        self._has_heard = False  # whether a meeting has told of a failure
        self._watch = FaultWatchdog(self.coordinates, everyone.store, timeout)

    def begin(self) -> None:
        """Start to watch for failures, and wait for all ranks at the start of a run (collective).

        The first time this makes the group of all ranks.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        Children.lose, Children.name_of = self._lose, self._name
        self._watch.start()
        if self.everyone.world.is_open:
            self._meet_all("the start of a run")
        else:
            meet_all(self.everyone)

    def take_coordinates(self, joined: Joined) -> None:
        """Set the mesh that this rank has joined, and with it the coordinates of this rank.

        Args:
            joined: what :func:`~lightning_hybrid.process.joining.join` has returned.
        """
        self._joined = joined

    @property
    def has_coordinates(self) -> bool:
        """Whether this rank has joined a mesh, so that its coordinates are final."""
        return self._joined is not None

    @property
    def joined(self) -> Joined:
        """The mesh that this rank has joined, with the survey of the devices.

        Raises:
            HybridError: it has joined none, as numbers of replicas and stages are not chosen yet.
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
        """The mesh that this rank has joined: its process groups and links.

        Raises:
            HybridError: it has joined none yet.
        """
        return self.joined.mesh

    @property
    def cluster(self) -> Cluster | None:
        """The devices of all ranks, and their order in the mesh; ``None``: there was no survey."""
        return self.joined.cluster

    @property
    def _speaks_to_all(self) -> Mesh | Everyone:
        """This rank with its store and the group of all ranks: its mesh, if it has joined one."""
        return self._joined.mesh if self._joined else self.everyone

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank, which may change when it joins the mesh."""
        return self._speaks_to_all.coordinates

    def survive(self, *, survives: bool) -> None:
        """Before a run, set whether the other replicas go on if one is lost; all ranks call it.

        Args:
            survives: whether they go on (``BySpeed(on_loss="continue")``); equal on all ranks. The
                mesh must have been joined.
        """
        self.mesh.survive(survives=survives)

    def _lose(self, children: Collection[int]) -> set[int] | None:
        """Take note of ranks that have ended with an error, and decide whether the run goes on.

        The thread that watches this process's children calls it, as ``Children.lose``. If the run
        does not go on, the loss is recorded in the store.

        Args:
            children: the lost ranks: their global ranks minus that of this process.

        Returns:
            All global ranks of the replicas that the run goes on without; ``None``: the run ends.
        """
        lost = [self.everyone.coordinates.rank + number for number in children]
        survivors = self.mesh.survivors if self._joined is not None else None
        given_up = survivors.lose(lost) if survivors is not None else None
        if given_up is None:
            tell_lost(self._speaks_to_all, lost)
        return given_up

    def _name(self, child: int) -> str:
        """The name of a rank that this process has started: its global rank minus this one's."""
        here = self.everyone.coordinates
        return str(replace(self.coordinates, rank=here.rank + child))

    def barrier(self, name: str = "") -> None:
        """In phase TOGETHER, wait for all ranks that run the script; in other phases do nothing.

        Args:
            name: name of the barrier, which must be equal on all ranks that wait.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        if self.phase is Phase.TOGETHER:
            self._meet(f"barrier({name!r})")

    def broadcast(self, value: T, source: int = 0) -> T:
        """In phase TOGETHER, send the value of one rank to all ranks that run the script.

        All of them call this together, and get the value. In other phases the value of this rank is
        returned at once.

        Args:
            value: value of this rank.
            source: rank whose value all get, as Lightning counts ranks (``trainer.global_rank``).

        Raises:
            Exception: the error of the first rank that has failed.
        """
        if self.phase is Phase.LONE:
            self.said.append(value)
        if self.phase is not Phase.TOGETHER:
            return value
        self._meet("a broadcast")
        # `source` is a number of the user's world, in which drivers come first
        numbers = [replace(self.coordinates, rank=rank).lightning_rank for rank in self._scripts()]
        same: T = broadcast_object(self._group, value, numbers.index(source))
        return same

    def gather(self, value: T, place: str) -> list[T]:
        """Gather a value of each rank that runs the script.

        All of these ranks call this together, in phase TOGETHER.

        Args:
            value: value of this rank, of any class that can be pickled.
            place: name of the place in the program, equal on all ranks.

        Returns:
            The values, by ascending global rank.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        self._meet(place)
        return gather_objects(self._group, value)

    def shared_names(self, module: nn.Module) -> frozenset[str]:
        """Names of the parameters and buffers that a module has on every driver.

        A driver may have further ones, which the module's ``forward`` registered in an earlier run.
        All drivers call this together, in phase TOGETHER, when a run is set up.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        names = self.gather(sorted(tensors_of(module)), "the setup of a run")
        return frozenset.intersection(*map(frozenset, names))

    def end_run(self) -> None:
        """End a run that has not failed: enter phase TOGETHER, and wait for all ranks (collective).

        Then stops watching for failures. The wait is needed since one replica may predict for
        longer than the others, and rank 0, which hosts the store, must not end before them.

        Raises:
            Exception: the error of the first rank that has failed.
        """
        self.phase = Phase.TOGETHER
        self._meet_all("the end of a run")
        self.stop_watching()

    def _ranks(self) -> Sequence[int]:
        """The global ranks of all processes, without those of lost replicas."""
        return self.mesh.living_ranks() if self._joined else range(self.everyone.world.size())

    def _scripts(self) -> Sequence[int]:
        """The global ranks that run the script: drivers, or before a mesh is joined all ranks."""
        here, drivers = self.coordinates, self._joined is not None
        return [r for r in self._ranks() if not drivers or replace(here, rank=r).is_driver]

    @property
    def _group(self) -> Group:
        """The process group of the ranks that run the script."""
        return self.mesh.scripts if self._joined else self.everyone.world

    def _meet(self, place: str) -> None:
        """Wait for all ranks that run the script; raise the first failure if one has failed.

        Args:
            place: name of the place in the program, equal on all of them.
        """
        self._wait(self._group, self._scripts(), place)

    def _meet_all(self, place: str) -> None:
        """Wait for all ranks, workers too; raise the first failure if one of them has failed.

        Args:
            place: name of the place in the program, equal on all ranks.
        """
        self._wait(self.everyone.world, self._ranks(), place)

    def _wait(self, group: Group, ranks: Sequence[int], place: str) -> None:
        names = {rank: str(replace(self.coordinates, rank=rank)) for rank in ranks}
        look = self._watch.wait_for(names, place)
        if not meet(group, place=place, look=look):
            self._has_heard = True
            raise read_fault(self.everyone.store).exception()

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Context in which rank 0 is in phase CHOOSING: its barriers and broadcasts do nothing.

        Used on rank 0 while it chooses sizes that the user has left open. After an error inside the
        phase stays CHOOSING.
        """
        before, self.phase = self.phase, Phase.CHOOSING
        yield
        self.phase = before  # not after an error, of which `fail` tells the others

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before, self.phase = self.phase, Phase.ALONE
        try:
            yield
        finally:
            self.phase = before

    def defer_signals(self) -> None:
        """Put off the handlers of signals while messages are exchanged, from now on.

        Also runs handlers of signals that wait. While a handler runs, this rank is in phase ALONE,
        since the other drivers may wait for it and cannot take part in barriers.
        """
        make_deferrable(self._alone)
        run_pending(hold=False)

    def serve(self) -> None:
        """On a worker, enter phase SERVING: from now on only its driver tells it of failures."""
        self.phase = Phase.SERVING
        self._watch.serve()

    def stop_watching(self) -> None:
        """End the thread that kills this process after a failure of another rank."""
        self._watch.close()
        SENDS.close()

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """Tell the other ranks that this one has failed, and enter phase FAILED.

        Args:
            error: what this rank has raised.
            rank: name of this rank in messages.

        Returns:
            The failure to report instead of ``error``: that of another rank, which came first;
            ``None``: this rank is the first to fail.
        """
        self.stop_watching()
        if self._joined and self.mesh.survivors is not None and is_loss(error):
            self.mesh.survivors.await_end()
        # this error may be a consequence of another rank's, which is then in the store
        first = first_fault(self._speaks_to_all, error, rank)
        # others wait for this rank at the next meeting, unless it has heard of the failure at one
        together = self.phase in (Phase.TOGETHER, Phase.CHOOSING) and not self._has_heard
        if together and not is_loss(error):
            say_at_next_meeting(self._group)
        self.phase = Phase.FAILED
        return first

    def leave(self) -> None:
        """After a failure, close the groups of the mesh, which wakes ranks that wait in them.

        Enters phase FAILED. The next run makes all groups anew.
        """
        self.phase = Phase.FAILED
        forget()


class NoWorld:
    """Stands in for `World` in a process without groups: before a run, or after a failed one."""

    phase = Phase.APART
    has_coordinates = False

    def barrier(self, name: str = "") -> None:
        """Do nothing, since there are no groups."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return ``value`` as it is: nothing is sent, since there are no groups."""
        return value

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """Return the failure of another rank that ``error`` passes on; tell no rank.

        ``None``: the error is this rank's own.

        Args:
            error: what this rank has raised.
            rank: name of this rank in messages.
        """
        return first_fault(None, error, rank)

    def leave(self) -> None:
        """Give up the mesh that an earlier Trainer of this process has left, if there is one."""
        forget()
