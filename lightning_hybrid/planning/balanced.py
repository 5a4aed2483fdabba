"""Cut a network so that its slowest stage is as fast as possible, in milliseconds for any size.

With many micro-batches a step takes about their number times the time of its slowest stage or
message, so such cuts are nearly the best. They are found by bisection: for a time limit each stage
takes as many partitions as it can, and either the last one reaches the end of the network or the
limit is too low. `fastest_cuts.best_chain` is optimal, but too slow for a thousand stages.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from lightning_hybrid.planning.fastest_cuts import fair_ends
from lightning_hybrid.planning.step_problem import StepProblem

_HALVINGS = 24
_ROOM = (1.0, 1.05, 1.2, 1.5)
"""Multiples of the least possible time limit that are tried too: a stage that takes a little longer
may end at a cut that fewer bytes cross."""


def balanced_ends(problem: StepProblem, order: Sequence[int]) -> list[int] | None:
    """Cut a network into runs of consecutive partitions, one for each entry of a list of devices.

    Each run is a stage. Of the cuts that are tried those with the shortest fill-drain step are
    taken.

    Args:
        problem: The partitions and devices.
        order: Device of each run, by index in the replica; a device may occur several times, but
            not twice in a row.

    Returns:
        For each run its end, the number after its last partition; None if no cuts were found that
        keep every device within its memory.
    """
    if len(order) > problem.n:
        return None
    packing = _Packing(problem, order)
    # (a little more, since sums are rounded)
    top = (1 + 1e-9) * (packing.work[-1] + 2 * packing.dearest) / min(problem.speeds)
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
        # with several runs a device full runs at the front are not always good: try fair shares
        fair = fair_ends(problem, order)
        found.append(fair if problem.fits(fair, order) else None)
    return min(
        map(list, dict.fromkeys(tuple(ends) for ends in found if ends is not None)),
        key=lambda ends: problem.step_time_s(ends, order),
        default=None,
    )


class _Packing:
    """Fills runs one after the other with as many partitions as a time limit and memory allow.

    Args:
        problem: The partitions and devices.
        order: Device of each run, by index in the replica.
    """

    def __init__(self, problem: StepProblem, order: Sequence[int]) -> None:
        self.problem = problem
        self.order = list(order)
        self.work = [0.0, *accumulate(problem.table.loads)]
        self.memory = problem.table.sums["memory_bytes"]
        turns = max(self.order.count(device) for device in set(self.order))
        # a device that has several runs divides its memory equally over them
        self.ceilings = [ceiling / turns for ceiling in problem.ceilings]
        rates = problem.links.seconds_per_byte
        pairs = zip(self.order, self.order[1:])
        self.rates = [2 * rates[i][j] for i, j in pairs]  # activations and gradients
        self.dearest = max(problem.table.cut_bytes, default=0.0) * max(self.rates, default=0.0)

    def ends(self, limit_s: float) -> list[int] | None:
        """Fill the runs under a time limit.

        Args:
            limit_s: Most seconds that a micro-batch may take in a run (forward and backward), and
                that its activations and gradients may take between two runs.

        Returns:
            For each run the number after its last partition; None: the runs cannot hold all
            partitions.
        """
        problem = self.problem
        n = self.problem.n
        count = len(self.order)
        ends, start = [], 0
        for run, device in enumerate(self.order):
            furthest = n - (count - 1 - run)  # leaves a partition for each run that follows
            most = self.work[start] + limit_s * problem.speeds[device]
            end = min(furthest, bisect_right(self.work, most) - 1)
            if self.ceilings:
                held = self.memory[start] + self.ceilings[device]
                end = min(end, bisect_right(self.memory, held) - 1)
                while end > start and problem.table.held(start, end) > self.ceilings[device]:
                    end -= 1
            if run < count - 1:
                while end > start and problem.table.cut_bytes[end - 1] * self.rates[run] > limit_s:
                    end -= 1
            if end <= start:
                return None
            ends.append(end)
            start = end
        return ends if start == n else None
