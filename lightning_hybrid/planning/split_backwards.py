"""Which stages' backwards to split: those where the shorter drain is worth the longer backward.

A split backward takes `input_s + weight_s`, which may be more than a joint one (batch
normalisation, for one, makes the same sums for both parts). So the stages are tried one by one, by
the simulated step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_hybrid.planning.looped_placements import improved
from lightning_hybrid.planning.step_problem import StepProblem
from lightning_hybrid.planning.step_time import StepCosts, fill_drain_s


@dataclass(frozen=True, kw_only=True)
class Halves:
    """The two parts of the backward of n partitions, for one micro-batch.

    Attributes:
        input_s: (n,) for the gradients of the inputs, on a device of speed 1.
        weight_s: (n,) for those of the weights, afterwards; None: it cannot be split.
    """

    input_s: Sequence[float]
    weight_s: Sequence[float | None]


def best_split_chain(
    problem: StepProblem, ends: Sequence[int], devices: Sequence[int], halves: Halves
) -> tuple[list[int], StepCosts]:
    """Improve the cuts of a chain for backwards that may be split.

    Args:
        problem: What was placed.
        ends: For each stage the number after its last partition: the best ones without a split.
        devices: Of each stage; each has its own.
        halves: The parts of the backwards.

    Returns:
        The ends, and what the stages take, some of them split.
    """

    def step_s(moved: Sequence[int]) -> float:
        if not problem.fits(moved, devices):
            return float("inf")
        _, costs = split_chain(problem, moved, devices, halves)
        return fill_drain_s(costs, problem.microbatches)

    return split_chain(problem, improved(list(ends), step_s), devices, halves)


def split_chain(
    problem: StepProblem, ends: Sequence[int], devices: Sequence[int], halves: Halves
) -> tuple[list[int], StepCosts]:
    """The same with the cuts as they are: those stages are split for which it pays."""
    joint = problem.costs(ends, devices)
    parts: list[tuple[float, float] | None] = [None]
    for (a, b), device in list(zip(pairwise((0, *ends)), devices))[1:]:
        weights = halves.weight_s[a:b]
        speed = problem.speeds[device]
        known = [w for w in weights if w is not None]
        parts.append(
            (sum(halves.input_s[a:b]) / speed, sum(known) / speed)
            if len(known) == len(weights) and sum(known) > 0
            else None
        )

    def costs(chosen: frozenset[int]) -> StepCosts:
        rows = [
            part if part and stage in chosen else (b, 0.0)
            for stage, (b, part) in enumerate(zip(joint.backward_s, parts))
        ]
        return replace(joint, backward_s=[b for b, _ in rows], weight_s=[w for _, w in rows])

    def step_s(chosen: frozenset[int]) -> float:
        return fill_drain_s(costs(chosen), problem.microbatches)

    may = [stage for stage, part in enumerate(parts) if part]
    starts = (frozenset[int](), frozenset(may))
    best = min((_toggled(start, may, step_s) for start in starts), key=step_s)
    return list(ends), costs(best)


def _toggled(
    chosen: frozenset[int], may: Sequence[int], step_s: Callable[[frozenset[int]], float]
) -> frozenset[int]:
    """Split one stage more, or one less, as long as that makes the step shorter."""
    best_s, better = step_s(chosen), True
    while better:
        better = False
        for stage in may:
            tried = chosen ^ {stage}
            took_s = step_s(tried)
            if took_s < best_s:
                chosen, best_s, better = tried, took_s, True
    return chosen
