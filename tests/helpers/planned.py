"""Plans, problems and simulated steps from plain lists."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_hybrid.planning.cluster_description import ClusterDescription
from lightning_hybrid.planning.memory_check import ChainSizes
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.search import PlanSettings, Replica, plan_stages
from lightning_hybrid.planning.shape_costs import (
    in_training,
    links_of,
    problem_of,
    ring_of,
    rings_s,
)
from lightning_hybrid.planning.simulate import Timeline
from lightning_hybrid.planning.simulate import simulate as simulate_costs
from lightning_hybrid.planning.step_problem import StepProblem
from lightning_hybrid.planning.step_time import StepCosts
from lightning_hybrid.schedules import Schedule


def _taken(arguments: dict[str, Any], kind: Any) -> Any:
    """An instance of a dataclass, with its fields taken out of the arguments."""
    return kind(**{f.name: arguments.pop(f.name) for f in fields(kind) if f.name in arguments})


def planned(**arguments: Any) -> Plan:
    """`plan_stages`, with the fields of its records among its arguments."""
    table, settings = _taken(arguments, PartitionTable), _taken(arguments, PlanSettings)
    return plan_stages(table, settings, _taken(arguments, Replica), **arguments)


def made_plan(**changes: object) -> Plan:
    """A plan of four partitions, with other arguments of :func:`planned` where they are given."""
    arguments = {
        "names": list("abcd"),
        "forward_s": [1.0] * 4,
        "backward_s": [2.0] * 4,
        "cut_bytes": [8.0] * 3,
        "parameters": [1] * 4,
        "layers": [1] * 4,
        "replicas": 2,
        "stages": 2,
        "microbatches": 2,
        "bandwidth_bytes_per_s": 8.0,
        "step_s": [0.5] * 4,
        "reduce_s": [1.0] * 4,
        "memory_bytes": [10] * 4,
        "gradient_bytes": [100] * 4,
    }
    return planned(**(arguments | changes))


def step_problem(**arguments: Any) -> StepProblem:
    """A problem, with the columns of its table among the arguments."""
    return StepProblem(table=_taken(arguments, PartitionTable), **arguments)


def problem_on(
    costs: PartitionTable,
    cluster: ClusterDescription,
    devices: int,
    microbatches: int,
    *,
    recompute: bool = False,
    replica: int | None = None,
) -> StepProblem:
    """The problem of replicas of so many devices, on all of a cluster: see `problem_of`."""
    replicas = len(cluster.devices) // devices
    reduce_s = rings_s(ring_of(cluster, devices), costs.gradient_bytes, replicas)
    costs = costs.averaged() if replicas > 1 else costs
    way = ChainSizes(stages=devices, microbatches=microbatches, recompute=recompute)
    table = in_training(costs, way, reduce_s)
    return problem_of(table, cluster, way, links_of(cluster, devices), replica)


@dataclass(frozen=True)
class Simulated(Timeline):
    """One step of a replica, as simulated.

    Attributes:
        busy_s: seconds that each device computes or steps.
    """

    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they neither compute nor step."""
        total_s = len(self.busy_s) * self.makespan_s
        return (total_s - sum(self.busy_s)) / total_s if total_s else 0.0


def simulate(
    schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float], **times: Any
) -> Simulated:
    """A simulated step from lists, or from one number for all stages or cuts."""
    stages = schedule.stages
    for name, value in times.items():
        if isinstance(value, int | float):
            times[name] = [value] * (stages - (name in ("send_s", "latency_s")))
    devices = times.pop("devices", range(stages))
    costs = StepCosts(forward_s, backward_s, devices, **times)
    found = simulate_costs(schedule, costs)
    busy_s = [0.0] * len(set(devices))
    for event in found.events:
        if event.instruction.kind.computes:
            busy_s[devices[event.stage]] += event.end_s - event.start_s
    for device, step_s in zip(devices, costs.step_s):
        busy_s[device] += step_s
    return Simulated(found.events, found.makespan_s, tuple(busy_s))
