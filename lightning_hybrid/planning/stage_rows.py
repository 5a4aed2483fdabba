"""What each stage of a plan holds, takes and sends: rows for reports."""

from collections.abc import Sequence
from itertools import pairwise

from lightning_hybrid.planning.stage_plan import StagePlan
from lightning_hybrid.planning.step_time import StepCosts


def stage_rows(
    ends: Sequence[int],
    costs: StepCosts,
    *,
    names: Sequence[str],
    layers: Sequence[int],
    parameters: Sequence[int],
    loads: Sequence[float],
    cut_bytes: Sequence[float],
    memory_bytes: Sequence[int] | None = None,
    gradient_bytes: Sequence[int] | None = None,
) -> tuple[StagePlan, ...]:
    """The rows of a placement.

    Args:
        ends: For each of S stages the number after its last partition.
        costs: What the stages take.
        names: n names of partitions.
        layers: n numbers of layers.
        parameters: n numbers of parameter elements.
        loads: n computation loads, in any unit.
        cut_bytes: n - 1 sizes of what crosses the cut after a partition, per micro-batch.
        memory_bytes: n sizes of what a partition holds; None: not known.
        gradient_bytes: n sizes of its gradients; None: not known.
    """
    total = sum(loads) or 1.0
    sizes = [*cut_bytes, 0]
    rows = []
    for stage, (a, b) in enumerate(pairwise((0, *ends))):
        is_last = stage == len(ends) - 1
        rows.append(
            StagePlan(
                layers=sum(layers[a:b]),
                partitions=tuple(names[a:b]),
                parameters=sum(parameters[a:b]),
                load=sum(loads[a:b]) / total,
                device=costs.devices[stage],
                memory_bytes=None if memory_bytes is None else sum(memory_bytes[a:b]),
                forward_s=costs.forward_s[stage],
                backward_s=costs.backward_s[stage],
                weight_s=_at(costs.weight_s, stage),
                send_s=0.0 if is_last else _at(costs.send_s, stage),
                latency_s=0.0 if is_last else _at(costs.latency_s, stage),
                reduce_s=_at(costs.reduce_s, stage),
                step_s=_at(costs.step_s, stage),
                cut_bytes=round(sizes[b - 1]),
                gradient_bytes=None if gradient_bytes is None else sum(gradient_bytes[a:b]),
            )
        )
    return tuple(rows)


def _at(values: Sequence[float], index: int) -> float:
    return values[index] if len(values) else 0.0
