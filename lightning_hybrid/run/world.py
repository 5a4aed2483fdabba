"""All ranks of a run: who may wait for whom, before, during and after it.

Between ``setup_distributed`` and the parting of drivers and workers in ``setup``, and again after
the end of a run, barriers and broadcasts are over all ranks. During the run they are over the
drivers, by Lightning's own means. Where the sizes are ours to choose, ranks have no coordinates
until ``setup``.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm import (
    Coordinates,
    Failure,
    Mesh,
    broadcast_object,
    gather_objects,
    make_deferrable,
    meet,
    run_pending,
)
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Cluster
from lightning_hybrid.process import (
    Everyone,
    Joined,
    Watch,
    first_fault,
    forget,
    is_loss,
    read_fault,
    say_at_next_meeting,
)
from lightning_hybrid.stage import tensors_of
from lightning_hybrid.state import gather_after_run, gather_optimizer_after_run

T = TypeVar("T")


class Phase(Enum):
    """Whom a barrier or a broadcast speaks to."""

    APART = "nobody: this process has no groups yet"
    TOGETHER = "all ranks: before the setup of a run, and after its end"
    CHOOSING = "nobody: rank 0 looks at the network, and the others wait for what it says"
    RUNNING = "the drivers"
    SERVING = "nobody: a worker hears its driver alone"
    ALONE = "nobody: this driver handles a signal, and others may wait for it"
    FAILED = "nobody: the others may be gone"


class World:
    """The groups of a run as all ranks share them.

    Args:
        everyone: all ranks.

    Attributes:
        everyone: all ranks.
        phase: whom a barrier speaks to now.
        supposed_replicas: how many there are to the user's code in phase CHOOSING.
    """

    def __init__(self, everyone: Everyone) -> None:
        self.everyone, self.phase = everyone, Phase.TOGETHER
        self.supposed_replicas = 1
        self._joined: Joined | None = None
        self._has_heard = False  # of a failure, at a meeting
        self._watch = Watch(str(self.coordinates), everyone.store)

    def take_coordinates(self, joined: Joined) -> None:
        """Sizes are known: this rank has coordinates in the mesh."""
        self._joined = joined

    @property
    def has_coordinates(self) -> bool:
        """Whether ranks have coordinates in a mesh."""
        return self._joined is not None

    @property
    def joined(self) -> Joined:
        """What this rank has joined.

        Raises:
            HybridError: no sizes are known yet.
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
        """The groups."""
        return self.joined.mesh

    @property
    def cluster(self) -> Cluster | None:
        """The devices of all ranks; ``None``: nobody has looked."""
        return self.joined.cluster

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands; sizes and a survey of the devices may change it."""
        return (self._joined.mesh if self._joined else self.everyone).coordinates

    def open(self) -> None:
        """Make the group of the drivers."""
        self.mesh.init_default_group()

    def barrier(self, name: str = "") -> None:
        """Wait for all ranks, in phase TOGETHER.

        Args:
            name: of the barrier.

        Raises:
            Exception: of the first rank that has failed.
        """
        if self.phase is Phase.TOGETHER:
            self._meet(f"barrier({name!r})")

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank on all ranks, in phase TOGETHER; else that of this rank.

        Args:
            value: of this rank.
            source: ``global_rank`` of the one whose value all get.

        Raises:
            Exception: of the first rank that has failed.
        """
        if self.phase is not Phase.TOGETHER:
            return value
        self._meet("a broadcast")
        world, here = self.everyone.world, self.coordinates
        # the user's code numbers drivers first
        numbers = [replace(here, rank=rank).lightning_rank for rank in range(world.size())]
        same: T = broadcast_object(world, value, numbers.index(source))
        return same

    def shared_names(self, module: nn.Module) -> frozenset[str]:
        """Names of the parameters and buffers that a module has on all ranks, in phase TOGETHER.

        What its ``forward`` has registered in an earlier run, one driver has alone.

        Raises:
            Exception: of the first rank that has failed.
        """
        self._meet("the setup of a run")
        names, world = sorted(tensors_of(module)), self.everyone.world
        # names of a large module are long: most often a digest shows that they are alike
        digests = gather_objects(world, hashlib.sha256("\n".join(names).encode()).digest())
        if len(set(digests)) == 1:
            return frozenset(names)
        return frozenset.intersection(*map(frozenset, gather_objects(world, names)))

    def gather(self, value: T, place: str) -> list[T]:
        """The values of all ranks, in phase TOGETHER.

        Args:
            value: of this rank.
            place: where in the program this is.

        Raises:
            Exception: of the first rank that has failed.
        """
        self._meet(place)
        return gather_objects(self.everyone.world, value)

    def end_run(self) -> None:
        """The end of a run, on all ranks: no script ends, and no store with it, while others run.

        One replica may predict for longer than the others.

        Raises:
            Exception: of the first rank that has failed.
        """
        self.phase = Phase.TOGETHER
        self._meet("the end of a run")

    def _meet(self, place: str) -> None:
        if not meet(self.everyone.world, place=place):
            self._has_heard = True
            raise read_fault(self.everyone).exception()

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """After a run: what other ranks have of a module, on rank 0. All ranks call it."""
        return gather_after_run(module, self.mesh)

    def optimizer_state(
        self, module: nn.Module, optimizer: Optimizer, divided: bool
    ) -> dict[str, Any]:
        """After a run: the state dict of one device, on rank 0. All ranks call it.

        Args:
            module: the LightningModule.
            optimizer: one of its.
            divided: whether the replicas have different states.
        """
        return gather_optimizer_after_run(module, optimizer, self.mesh, divided=divided)

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside, this rank looks at the network, and speaks to nobody."""
        self.phase = Phase.CHOOSING
        yield
        self.phase = Phase.TOGETHER  # after an error it stays, and the others are told

    @contextmanager
    def supposing(self, replicas: int) -> Iterator[None]:
        """Inside, in phase CHOOSING, the user's code finds so many replicas."""
        self.supposed_replicas = replicas
        try:
            yield
        finally:
            self.supposed_replicas = 1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        before, self.phase = self.phase, Phase.ALONE
        try:
            yield
        finally:
            self.phase = before

    def defer_signals(self) -> None:
        """From now on handlers of signals wait until no messages are under way.

        While one runs, this rank is ALONE: the other drivers may be waiting for it.
        """
        # a handler in the middle of a pass would leave messages that nobody takes
        make_deferrable(self._alone)
        run_pending(hold=False)

    def serve(self) -> None:
        """This rank obeys its driver, and hears from it what becomes of the run."""
        self.phase = Phase.SERVING
        self._watch.serve()

    def stop_watching(self) -> None:
        """This rank ends by itself, or is told by others: it need not be killed."""
        self._watch.close()

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """Tell other ranks of a failure of this one.

        Args:
            error: what was raised.
            rank: this one, as messages name it.

        Returns:
            The failure that came first, on another rank; ``None``: it is this one.
        """
        self.stop_watching()
        ranks = self._joined.mesh if self._joined else self.everyone
        # errors of other ranks are often consequences: the store knows which came first
        first = first_fault(ranks, error, rank)
        # a rank that has not heard of it at a meeting is missed there, whoever has failed first
        together = self.phase in (Phase.TOGETHER, Phase.CHOOSING) and not self._has_heard
        if together and not is_loss(error):
            say_at_next_meeting(self.everyone)
        if self._joined and not self.coordinates.is_driver:
            self.mesh.say_goodbye(first or Failure.of(error, rank))
        self.phase = Phase.FAILED
        return first

    def leave(self) -> None:
        """After a failure: talk to nobody any more, and wake those who wait for this rank."""
        self.phase = Phase.FAILED
        forget()


class NoWorld:
    """Before the first run of a process there are no groups: it knows nobody."""

    phase = Phase.APART
    has_coordinates = False
    supposed_replicas = 1

    def barrier(self, name: str = "") -> None:
        """Nobody to wait for."""

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of this rank."""
        return value

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Nothing is on other ranks."""
        return {}

    def optimizer_state(
        self, module: nn.Module, optimizer: Optimizer, divided: bool
    ) -> dict[str, Any]:
        """All of it is here."""
        return optimizer.state_dict()

    def stop_watching(self) -> None:
        """Nobody watches."""

    def fail(self, error: BaseException, rank: str) -> Failure | None:
        """Nobody can be told; another rank may have told this one before."""
        return first_fault(None, error, rank)

    def leave(self) -> None:
        """A mesh of an earlier Trainer is not used again."""
        forget()
