"""How networks are found and cut: what a run decides before it has seen any."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_hybrid.planning import CalledNetwork, Plan


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
