"""Choose the stages whose backward is split, by the predicted step time.

A split backward computes first the gradients of the inputs (input part), for which the previous
stage waits, later those of the weights (weight part). The two parts together may take longer than a
joint backward (batch normalisation, for instance, computes the same sums for both). So splitting is
tried stage by stage.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

from lightning_hybrid.planning.looped_placements import improved
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.step_problem import StepProblem
from lightning_hybrid.planning.step_time import MARGIN, StepCosts, fill_drain_s
from lightning_hybrid.schedules import INSIDE, make_schedule

_MOST_SIMULATED = 256
"""Largest product of stages and micro-batches for which single stages are tried one by one, since
each try simulates a step."""


def best_split_chain(
    problem: StepProblem, ends: Sequence[int], devices: Sequence[int]
) -> tuple[list[int], StepCosts]:
    """Improve the cuts of a chain for backwards that may be split, under schedule `zero_bubble`.

    Args:
        problem: The partitions and devices.
        ends: For each stage the number after its last partition, of a good chain without split
            backwards.
        devices: The device of each stage, by index in the replica; all differ.

    Returns:
        The improved ends, and the costs of the stages: those with a `weight_s` above 0 have a split
        backward.
    """

    def step_s(moved: Sequence[int]) -> float:
        if not problem.fits(moved, devices):
            return float("inf")
        return fill_drain_s(split_costs(problem, moved, devices), problem.microbatches)

    best = improved(list(ends), step_s)
    return best, split_costs(problem, best, devices)


def split_costs(problem: StepProblem, ends: Sequence[int], devices: Sequence[int]) -> StepCosts:
    """Choose the stages of a chain whose backward is split under schedule `zero_bubble`.

    Single stages are split or made joint as long as that shortens the predicted step.

    Args:
        problem: The partitions and devices.
        ends: For each stage the number after its last partition.
        devices: The device of each stage, by index in the replica; all differ.

    Returns:
        The costs of the stages: those with a `weight_s` above 0 have a split backward.
    """
    parts = _SplitCosts(problem, ends, devices)

    def step_s(chosen: frozenset[int]) -> float:
        return fill_drain_s(parts.costs(chosen), problem.microbatches)

    # a search by single changes may end in a local optimum, so two starts are tried
    starts = (frozenset[int](), frozenset(parts.may))
    return parts.costs(min((_toggled(start, parts.may, step_s) for start in starts), key=step_s))


def split_costs_inside(
    problem: StepProblem, ends: Sequence[int], devices: Sequence[int]
) -> StepCosts:
    """Choose the stages whose backward is split, for backwards that run inside of calls (`1f1b`).

    The choice begins with all stages that may be split; in small problems single stages are then
    made joint again where that helps. If the step is not shorter by `MARGIN` than without any split
    backward, no stage is split.

    Args:
        problem: The partitions and devices.
        ends: For each stage the number after its last partition.
        devices: The device of each stage, by index in the replica; all differ.

    Returns:
        The costs of the stages: those with a `weight_s` above 0 have a split backward.
    """
    parts = _SplitCosts(problem, ends, devices)

    @cache
    def step_s(chosen: frozenset[int]) -> float:
        return inside_s(parts.costs(chosen), problem.microbatches)

    joint, split = frozenset[int](), frozenset(parts.may)
    if split and len(ends) * problem.microbatches <= _MOST_SIMULATED:
        split = _toggled(split, parts.may, step_s)
    pays = bool(split) and step_s(split) < (1 - MARGIN) * step_s(joint)
    return parts.costs(split if pays else joint)


def inside_s(costs: StepCosts, microbatches: int) -> float:
    """Predict the seconds of a step of `1f1b`, by simulation.

    Args:
        costs: times and devices of the stages; those with a `weight_s` above 0 have a split
            backward.
        microbatches: number of micro-batches.
    """
    split = tuple(stage for stage, weight_s in enumerate(costs.weight_s) if weight_s)
    schedule = make_schedule(INSIDE, len(costs.devices), microbatches, split=split)
    return simulate(schedule, costs).makespan_s


class _SplitCosts:
    """The costs of the stages of a chain, for any choice of the stages whose backward is split.

    Attributes:
        may: numbers of the stages that may be split.
    """

    def __init__(self, problem: StepProblem, ends: Sequence[int], devices: Sequence[int]) -> None:
        self._joint = problem.costs(ends, devices)
        bounds = zip(pairwise((0, *ends)), devices)
        # the first stage is not split: no stage waits for its gradients
        self._parts = [
            None,
            *(_parts(problem, a, b, device) for (a, b), device in list(bounds)[1:]),
        ]
        self.may = [stage for stage, part in enumerate(self._parts) if part]

    def costs(self, chosen: frozenset[int]) -> StepCosts:
        """The costs of all stages if the stages in `chosen` are split."""
        rows = [
            part if part and stage in chosen else (b, 0.0)
            for stage, (b, part) in enumerate(zip(self._joint.backward_s, self._parts))
        ]
        backward_s, weight_s = [b for b, _ in rows], [w for _, w in rows]
        return replace(self._joint, backward_s=backward_s, weight_s=weight_s)


def _parts(problem: StepProblem, a: int, b: int, device: int) -> tuple[float, float] | None:
    """Look up the times of the two parts of a stage's backward.

    Args:
        problem: The partitions and devices.
        a: Number of the stage's first partition.
        b: Number after its last partition.
        device: Its device, by index in the replica.

    Returns:
        Seconds of the input part and of the weight part, for a micro-batch; None: the backward
        cannot be split, or has no weight part.
    """
    table, speed = problem.table, problem.speeds[device]
    # the gradient of a weight is the sum of its uses, which one operation adds up
    if any(bisect_left(w.partitions, b) - bisect_left(w.partitions, a) > 1 for w in table.tied):
        return None
    # parts that were not measured are taken to be equal
    half_s = [backward_s / 2 for backward_s in table.backward_s]
    weights = (table.weight_part_s or half_s)[a:b]
    known = [weight_s for weight_s in weights if weight_s is not None]
    if len(known) < len(weights) or not sum(known):
        return None
    return sum((table.input_part_s or half_s)[a:b]) / speed, sum(known) / speed


def _toggled(
    chosen: frozenset[int], may: Sequence[int], step_s: Callable[[frozenset[int]], float]
) -> frozenset[int]:
    """Split one stage more, or one less, as long as the step gets shorter.

    Args:
        chosen: Numbers of the stages that are split to begin with.
        may: Numbers of the stages that may be split.
        step_s: Function from the split stages to the seconds of a step.

    Returns:
        Numbers of the stages that are split.
    """
    best_s, better = step_s(chosen), True
    while better:
        better = False
        for stage in may:
            tried = chosen ^ {stage}
            took_s = step_s(tried)
            if took_s < best_s:
                chosen = tried
                best_s = took_s
                better = True
    return chosen
