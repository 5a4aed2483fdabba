"""Layer-wise partitioning and merging: begin with one partition per layer, merge until K are left.

**A reconstruction.** Of Akintoye et al. 2023 (FGCS 149:432) the abstract and the highlights say
that partitions are merged to reduce the communication between devices; the cost, the criterion, the
order and the limit of a merge stand in a text that we could not read. What is built here is the
reading that fits: the most expensive cut is closed first, as long as no merged partition takes more
than its fair share of the whole, and a slack.

`merge` is that greedy rule (`allocation="merging"`). It knows equal devices only, and is no part of
GABRA. Loads and cut costs are in the same unit, such as seconds; a cut is crossed there and back.
"""

import itertools

from lightning_hybrid.allocation.knapsack import SLACK, Numbers, numbers
from lightning_hybrid.errors import AllocationError


def merge(loads: Numbers, cut_costs: Numbers, count: int, *, slack: float = 0.25) -> list[int]:
    """Merge neighbours across the most expensive cut, again and again, until `count` are left.

    A merge is allowed while the merged load is at most (1 + slack) of the fair share, the total
    load over `count`. When no allowed one is left, the two neighbours with the least load together
    are merged.

    Args:
        loads: n computation loads, one per layer or residual block.
        cut_costs: n - 1 costs of a cut after each.
        count: K, how many runs are wanted.
        slack: How far above the fair share a run may go.

    Returns:
        For each run the number after that of its last partition.

    Raises:
        AllocationError: wrong numbers, or a count that is not between 1 and n.
    """
    p = numbers("loads", loads)
    k = numbers("cut_costs", cut_costs, count=len(p) - 1)
    if not 1 <= count <= len(p):
        raise AllocationError(f"{len(p)} partitions cannot be merged into {count}")
    # with a slack of zero hardly any merge is allowed, since partitions do not divide evenly
    limit = (1 + slack) * p.sum() / count * (1 + SLACK)
    runs, cuts, ends = p.tolist(), k.tolist(), list(range(1, len(p) + 1))
    while len(runs) > count:
        merged = [a + b for a, b in itertools.pairwise(runs)]
        allowed = [i for i, load in enumerate(merged) if load <= limit]
        # ties go to the least load, so that runs grow evenly
        if allowed:
            place = max(allowed, key=lambda i: (cuts[i], -merged[i]))
        else:
            place = min(range(len(merged)), key=lambda i: (merged[i], -cuts[i]))
        runs[place : place + 2] = [merged[place]]
        del cuts[place], ends[place]
    return ends
