"""Choose the cuts, and the number v of stages per device, for the looped schedule.

There is no dynamic programme for stages that share devices, since the step time is no sum over
stages. So the search begins with fair shares of the work and moves one cut at a time, as long as
that shortens the predicted step.
"""

from collections.abc import Callable, Sequence
from functools import partial

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.fastest_cuts import fair_ends
from lightning_hybrid.planning.step_problem import StepProblem
from lightning_hybrid.schedules import MOST_ROUNDS, loop_order

_MOVES = (-3, -2, -1, 1, 2, 3)


def best_loop(problem: StepProblem) -> tuple[list[int], list[int]]:
    """Search for the stages of the looped schedule with the least predicted step time.

    All numbers of stages per device from 2 to `MOST_ROUNDS` are tried, as far as there are
    partitions.

    Args:
        problem: The partitions and devices.

    Returns:
        For each stage its end, the number after its last partition; and for each stage its device,
        by index in the replica.

    Raises:
        PlanError: there is one device only, or fewer than two partitions per device, or no cuts
            were found that fit into memory.
    """
    most = min(MOST_ROUNDS, problem.n // problem.m)
    if most < 2 or problem.m < 2:
        raise PlanError(
            f"schedule 'looped' gives each of {problem.m} devices (2 or more) two stages at least, "
            f"and the network has {problem.n} partitions, of which {2 * max(2, problem.m)} are "
            "needed: use schedule 'gpipe'"
            + (f", or at most {problem.n // 2} devices" if problem.n >= 4 else "")
        )
    best: tuple[float, list[int], list[int]] | None = None
    for rounds in range(2, most + 1):
        devices = list(loop_order(problem.m, rounds))
        # each number of rounds has another number of cuts, and a search of its own
        ends = improved(fair_ends(problem, devices), partial(problem.step_time_s, devices=devices))
        step_s = problem.step_time_s(ends, devices)
        if best is None or step_s < best[0]:
            best = step_s, ends, devices
    assert best is not None
    if best[0] == float("inf"):
        raise PlanError(
            f"no loop over {problem.m} devices keeps each within its memory: use larger devices, "
            "more of them, or smaller micro-batches"
        )
    return best[1], best[2]


def improved(ends: list[int], step_of: Callable[[Sequence[int]], float]) -> list[int]:
    """Move one cut at a time, by up to three partitions, as long as that makes the step shorter.

    Args:
        ends: For each stage its end, the number after its last partition.
        step_of: Function from ends to the predicted seconds of a step; infinite: not possible.

    Returns:
        The improved ends.
    """
    best_s = step_of(ends)
    better = True
    while better:
        better = False
        for cut in range(len(ends) - 1):
            low, high = (ends[cut - 1] if cut else 0), ends[cut + 1]
            for move in _MOVES:
                if not low < ends[cut] + move < high:
                    continue
                moved = [*ends[:cut], ends[cut] + move, *ends[cut + 1 :]]
                step_s = step_of(moved)
                if step_s < best_s:
                    best_s = step_s
                    ends = moved
                    better = True
                    break
    return ends
