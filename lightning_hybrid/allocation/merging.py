"""Layer-wise partitioning and merging: begin with one partition per layer, merge until K are left.

**A reconstruction.** Of Akintoye et al. 2023 (FGCS 149:432) the abstract and the highlights say
that partitions are merged to reduce the communication between devices; the cost, the criterion, the
order and the limit of a merge stand in a text that we could not read. What is built here is the
reading that fits: the most expensive cut is closed first, as long as no merged partition takes more
than its fair share of the whole, and a slack.

`merge` is that greedy rule (`allocation="merging"`), `merge_exactly` the dynamic programme to hold
beside it. Both know equal devices only, and neither is a part of GABRA. Loads and cut costs
are in the same unit, such as seconds; a cut is crossed there and back.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.allocation.knapsack import SLACK, Floats, Numbers, numbers
from lightning_hybrid.errors import AllocationError


@dataclass(frozen=True)
class Merging:
    """Runs of partitions, merged.

    Attributes:
        ends: for each run the number after that of its last partition.
        loads: computation of each run.
        cut_cost: sum over the cuts that are left.
        history: sum over the cuts before the first merge and after each; one entry if exact.
        limit: what the load of a run was to keep to; infinite if exact.
        exceeded: why a run is above the limit; empty if none is.
    """

    ends: tuple[int, ...]
    loads: tuple[float, ...]
    cut_cost: float
    history: tuple[float, ...]
    limit: float
    exceeded: str = ""

    @property
    def value(self) -> float:
        """Largest load plus the cost of all cuts: what `merge_exactly` minimises."""
        return max(self.loads) + self.cut_cost


def merge(loads: Numbers, cut_costs: Numbers, count: int, *, slack: float = 0.25) -> Merging:
    """Merge neighbours across the most expensive cut, again and again, until `count` are left.

    A merge is allowed while the merged load is at most (1 + slack) of the fair share, the total
    load over `count`. When no allowed one is left, the two neighbours with the least load together
    are merged, and the result says so.

    Args:
        loads: n computation loads, one per layer or residual block.
        cut_costs: n - 1 costs of a cut after each.
        count: K, how many runs are wanted.
        slack: How far above the fair share a run may go.

    Raises:
        AllocationError: wrong numbers, or a count that is not between 1 and n.
    """
    p, k = _checked(loads, cut_costs, count)
    if not slack >= 0:
        raise AllocationError(f"slack is {slack}: a number of 0 or more is needed")
    share = p.sum() / count
    limit = (1 + slack) * share
    runs, cuts, history, exceeded = p.tolist(), k.tolist(), [float(k.sum())], ""
    ends = list(range(1, len(runs) + 1))
    while len(runs) > count:
        merged = [a + b for a, b in itertools.pairwise(runs)]
        allowed = [i for i, load in enumerate(merged) if load <= limit * (1 + SLACK)]
        if allowed:
            place = max(allowed, key=lambda i: (cuts[i], -merged[i]))
        else:
            place = min(range(len(merged)), key=lambda i: (merged[i], -cuts[i]))
            exceeded = (
                f"with {len(runs)} runs left and {count} wanted, no two neighbours stay within "
                f"{limit:g} ({1 + slack:g} of the fair share {share:g}); the lightest two have "
                f"{merged[place]:g} together"
            )
        runs[place : place + 2] = [merged[place]]
        del cuts[place], ends[place]
        history.append(sum(cuts))
    if not exceeded and max(runs) > limit * (1 + SLACK):
        exceeded = f"one partition alone has {max(runs):g}, more than the limit {limit:g}"
    return Merging(tuple(ends), tuple(runs), history[-1], tuple(history), limit, exceeded)


def merge_exactly(loads: Numbers, cut_costs: Numbers, count: int) -> Merging:
    """The runs with the least largest load plus the cost of all cuts.

    For every load that a run can have, as a limit, a dynamic programme finds the cheapest cuts
    between runs within it; the best limit wins. n^2 limits at most, n^2 steps per run and limit.

    Raises:
        AllocationError: see `merge`.
    """
    p, k = _checked(loads, cut_costs, count)
    sums = np.concatenate([[0.0], np.cumsum(p)])
    lengths = np.where(np.triu(np.ones((len(p) + 1,) * 2), 1) > 0, sums - sums[:, None], np.inf)
    opened = np.concatenate([[0.0], k])  # the cost of the cut before each partition
    least = np.sort(k)[: count - 1].sum()
    best, ends = np.inf, [len(p)]
    limits = np.unique(lengths[np.isfinite(lengths)])
    for limit in limits[limits >= max(p.max(), p.sum() / count) * (1 - SLACK)]:
        if limit + least >= best:
            break
        cost, found = _cheapest_cuts(lengths <= limit * (1 + SLACK), opened, count)
        if limit + cost < best:
            best, ends = limit + cost, found
    runs = tuple(np.diff(sums[[0, *ends]]).tolist())
    paid = float(sum(k[end - 1] for end in ends[:-1]))
    return Merging(tuple(ends), runs, paid, (paid,), np.inf)


def _cheapest_cuts(
    allowed: NDArray[np.bool_], opened: Floats, count: int
) -> tuple[float, list[int]]:
    """Least cost of the cuts between `count` allowed runs, and their ends.

    `allowed[i, j]` is whether partitions i .. j-1 may be one run.
    """
    steps = np.where(allowed[:-1], opened[:, None], np.inf)
    reached = np.full(len(opened) + 1, np.inf)
    reached[0] = 0.0
    came_from = []
    for _ in range(count):
        costs = reached[:-1, None] + steps
        came_from.append(costs.argmin(axis=0))
        reached = costs.min(axis=0)
    ends = [len(opened)]
    if not np.isfinite(reached[-1]):
        return np.inf, ends
    for source in reversed(came_from[1:]):
        ends.append(int(source[ends[-1]]))
    return float(reached[-1]), ends[::-1]


def _checked(loads: Numbers, cut_costs: Numbers, count: int) -> tuple[Floats, Floats]:
    p = numbers("loads", loads)
    k = numbers("cut_costs", cut_costs, count=len(p) - 1)
    if not 1 <= count <= len(p):
        raise AllocationError(f"{len(p)} partitions cannot be merged into {count}")
    return p, k
