"""Chains whose slowest stage is as fast as can be: good cuts within milliseconds, at any size.

A step of many micro-batches is as long as its slowest stage or message, so a cut that makes that
one as short as possible is near the best. It is found by bisection: below a limit each stage takes
as many partitions as it can, and either the last one reaches the end of the network or the limit is
too low. `chains.best_chain` is optimal and too slow for a thousand stages.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from lightning_hybrid.planning import StepProblem, fair_ends

_HALVINGS = 24
_ROOM = (1.0, 1.05, 1.2, 1.5)
"""Multiples of the least limit that are tried: a longer stage may end where less crosses."""


def balanced_ends(problem: StepProblem, order: Sequence[int]) -> list[int] | None:
    """Cut a network into a run for each entry of an order of devices.

    Args:
        problem: What to place.
        order: Device of each run; a device may occur several times, not twice in a row.

    Returns:
        The number after the last partition of each run, or None if no such cut was found that keeps
        every device within its memory.
    """
    if len(order) > problem.n:
        return None
    packing = _Packing(problem, order)
    top = (packing.work[-1] + 2 * packing.dearest) / min(problem.speeds)
    if packing.ends(top) is None:
        return None
    low, high = 0.0, top
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if packing.ends(middle) is None:
            low = middle
        else:
            high = middle
    found = [packing.ends(high * room) for room in _ROOM]
    if len(order) > problem.m:
        # full runs in front leave little to the last ones of a loop, which others then wait for
        fair = fair_ends(problem, order)
        found.append(fair if problem.fits(fair, order) else None)
    return min(
        map(list, dict.fromkeys(tuple(ends) for ends in found if ends is not None)),
        key=lambda ends: problem.step_time_s(ends, order),
        default=None,
    )


class _Packing:
    """Fills one run after the other up to a limit."""

    def __init__(self, problem: StepProblem, order: Sequence[int]) -> None:
        self.problem, self.order = problem, list(order)
        self.work = [0.0, *accumulate(problem.table.loads)]
        self.memory = problem.table.sums["memory_bytes"]
        turns = max(self.order.count(device) for device in set(self.order))
        # a device that has several runs keeps a share of its memory for each
        self.ceilings = [ceiling / turns for ceiling in problem.ceilings]
        rates = problem.links.seconds_per_byte
        pairs = zip(self.order, self.order[1:])
        self.rates = [2 * rates[i][j] for i, j in pairs]  # there and back
        self.dearest = max(problem.table.cut_bytes, default=0.0) * max(self.rates, default=0.0)

    def ends(self, limit_s: float) -> list[int] | None:
        """The ends of runs that take, like their messages, at most `limit_s` for a micro-batch."""
        problem, n, count = self.problem, self.problem.n, len(self.order)
        ends, start = [], 0
        for run, device in enumerate(self.order):
            furthest = n - (count - 1 - run)  # a partition for each run that follows
            most = self.work[start] + limit_s * problem.speeds[device]
            end = min(furthest, bisect_right(self.work, most) - 1)
            if self.ceilings:
                held = self.memory[start] + self.ceilings[device]
                end = min(end, bisect_right(self.memory, held) - 1)
            if run < count - 1:
                while end > start and problem.table.cut_bytes[end - 1] * self.rates[run] > limit_s:
                    end -= 1
            if end <= start:
                return None
            ends.append(end)
            start = end
        return ends if start == n else None
