"""Options of a run that say how networks are found, cut and driven."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_hybrid.planning import CalledNetwork, Plan
from lightning_hybrid.stage import StageOptions

Planner = Callable[[CalledNetwork, int, Sequence[Plan], bool], Plan]
"""Makes the plan of a network, which is given with the inputs of one micro-batch: for a number of
micro-batches, and beside the plans of the networks that are placed already. The last argument says
whether the planner chooses the cuts, even if the user has given cut points."""


class Progress(Protocol):
    """Shows the user what is being done before the first step of a network."""

    def begin(self, what: str, /) -> None:
        """Show that the work on a network begins, and with what."""

    def doing(self, what: str, /) -> None:
        """Show what is being done now, if work has begun."""

    def over(self) -> None:
        """Show that the work is done."""


@dataclass(frozen=True)
class NetworkOptions:
    """How networks are found and cut.

    Attributes:
        names: names of the modules that are networks; ``None``: they are found by their calls.
        microbatches: into how many micro-batches a batch is split; ``None``: by the batch's size.
        planner: makes plans.
        stages: into how many stages a network is cut; ``None``: as many as a replica has devices.
        training: whether the run trains.
        compiled: whether stages run through ``torch.compile``.
        automatic: whether the user has asked for no number of stages: then a network that cannot be
            cut runs on the driver, and is no error.
        say: prints a line, once for all replicas.
        progress: shows what is being done.
        shared: names of the parameters and buffers of the LightningModule that all ranks have;
            ``None``: all names.
        verify: which calls are compared with what the network's Python gives; see `Verification`.
    """

    names: tuple[str, ...] | None
    microbatches: int | None
    planner: Planner
    training: bool
    compiled: bool
    automatic: bool
    say: Callable[[str], None]
    progress: Progress
    shared: frozenset[str] | None = None
    verify: int | Literal["auto", False] = False
    stages: int | None = None


@dataclass(frozen=True)
class DriverOptions:
    """How a driver drives its replica.

    Attributes:
        seed: seed of the random numbers inside networks.
        stages: how stages compute.
        shared: names of the parameters and buffers that the workers have too; ``None``: all names.
        share: whether the weights of a network that is cut must be sent from replica 0 to the other
            replicas, since they may differ.
        trains: whether ranks free the memory of parameters that other ranks own.
        folder: where ranks write files that others map, if possible.
        say: tells the user something, in one line.
        follows: whether networks draw the random numbers of one device; see `StepCalls`.
        shards: whether states of optimizers are divided over the replicas.
        first_failure: gives the error of the rank that failed first; called if a driver of another
            replica has failed.
    """

    seed: int
    stages: StageOptions
    shared: Collection[str] | None = None
    share: bool = False
    trains: bool = False
    folder: str = ""
    say: Callable[[str], None] = lambda _: None
    follows: bool = False
    shards: bool = False
    first_failure: Callable[[], Exception] = lambda: RuntimeError("another rank has failed")
