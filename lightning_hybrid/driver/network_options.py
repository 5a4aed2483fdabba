"""How networks are found, cut and driven: what a run decides before it has seen any."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_hybrid.planning import CalledNetwork, Plan
from lightning_hybrid.stage import StageOptions


class Planner(Protocol):
    """Makes plans."""

    def __call__(
        self,
        network: CalledNetwork,
        microbatches: int,
        /,
        *,
        beside: Sequence[Plan],
        chosen: bool,
    ) -> Plan:
        """A plan for a network.

        Args:
            network: with the tensors of one micro-batch.
            microbatches: their number.
            beside: plans of the networks that are placed already.
            chosen: choose the cuts, whatever the user has said.
        """


class Progress(Protocol):
    """Hears what is being done before a network's first step."""

    def begin(self, what: str, /) -> None:
        """The first piece of work begins."""

    def doing(self, what: str, /) -> None:
        """What is being done now, if something has begun."""

    def over(self) -> None:
        """All is done."""


@dataclass(frozen=True)
class NetworkOptions:
    """How networks are found and cut.

    Attributes:
        names: of the modules that are networks; ``None``: found.
        microbatches: into how many slices a batch is split; ``None``: by the size of the batch.
        planner: see :class:`Planner`.
        stages: into how many a network is cut; ``None``: as many as a replica has devices.
        training: whether the run trains.
        compiled: run stages through ``torch.compile``.
        automatic: whether the number of stages was not asked for: then a network that cannot be
            cut is no error, and runs on the driver.
        say: prints a line, once for all replicas.
        progress: hears what is being done.
        shared: names of the parameters and buffers of the LightningModule that all ranks have;
            ``None``: of all.
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
        seed: of the random numbers inside networks.
        stages: how stages compute.
        shared: names of the parameters and buffers that the workers have too; ``None``: of all.
        share: whether replicas may differ in weights that are not made yet, so that those of
            replica 0 must travel.
        trains: whether parameters that other ranks own give their memory back.
        folder: where ranks write what others map, if possible.
        say: tells the user something, in one line.
        follows: see `StepCalls`.
        shards: whether states of optimizers are divided over the replicas.
        first_failure: gives what the rank that failed first has raised; asked where a driver of
            another replica has failed.
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
