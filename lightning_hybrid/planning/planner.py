"""From a traced network to a plan: profile its partitions, choose the cuts."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_hybrid.errors import PlanError
from lightning_hybrid.network import NetworkGraph, NetworkPartition, find_boundary
from lightning_hybrid.planning.plan import Plan


@dataclass(frozen=True)
class PlanSettings:
    """What the user has asked for.

    Attributes:
        schedule: name of the schedule.
        allocation: ``"gabra"``, ``"exact"``, or cut points as named in the LightningModule.
        objective: ``"makespan"`` or ``"profit"``.
        seed: of the genetic algorithm.
    """

    schedule: str
    allocation: str | tuple[str, ...]
    objective: str
    seed: int


def make_plan(
    name: str,
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: list[Tensor],
    microbatches: int,
    *,
    settings: PlanSettings,
    shape: tuple[int, int],
) -> Plan:
    replicas, stages = shape
    assert isinstance(settings.allocation, tuple)
    prefix = f"{name}." if name else ""
    cuts = tuple(point.removeprefix(prefix) for point in settings.allocation)
    return Plan(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        schedule=settings.schedule,
        cuts=cuts,
    )
