"""Layer-wise partitioning and merging: begin with one partition per layer, merge until K are left.

**A reconstruction.** The abstract and the highlights of Akintoye et al. 2023 (FGCS 149:432) say
that partitions are merged to reduce the communication between devices; the cost, the criterion, the
order and the limit of a merge are in a text that we could not read. This is a version that agrees
with them: the most expensive cut is removed first, as long as no merged partition takes more than
its fair share of the load and a slack.

`merge` is this greedy rule (`allocation="merging"`). It takes devices to be equal, and is not part
of GABRA. Loads and cut costs are in the same unit, such as seconds; the cost of a cut is that of
activations and gradients together.
"""

import itertools

from lightning_hybrid.allocation.knapsack import SLACK, Numbers, numbers
from lightning_hybrid.errors import AllocationError


def merge(loads: Numbers, cut_costs: Numbers, count: int, *, slack: float = 0.25) -> list[int]:
    """Merge neighbours across the most expensive cut, again and again, until `count` runs are left.

    It is the rule of `allocation="merging"`. At first each partition is a run, then neighbouring
    runs are merged. A merge is allowed while the merged load is at most (1 + slack) times the fair
    share, which is the total load over `count`. When no merge is allowed any more, the two
    neighbours with the least load together are merged.

    Args:
        loads: n computation loads, one per layer or residual block.
        cut_costs: n - 1 costs, of a cut after each load but the last, in the same unit.
        count: K, the wanted number of runs of consecutive partitions.
        slack: Fraction by which the load of a run may exceed the fair share.

    Returns:
        For each run its end, the number after its last partition.

    Raises:
        AllocationError: `loads` or `cut_costs` are no such numbers, or `count` is not between 1 and
            n.
    """
    p = numbers("loads", loads)
    k = numbers("cut_costs", cut_costs, count=len(p) - 1)
    if not 1 <= count <= len(p):
        raise AllocationError(f"{len(p)} partitions cannot be merged into {count}")
    # loads do not divide evenly, so that with no slack hardly any merge would be allowed
    limit = (1 + slack) * p.sum() / count * (1 + SLACK)
    runs = p.tolist()
    cuts = k.tolist()
    ends = list(range(1, len(p) + 1))
    while len(runs) > count:
        merged = [a + b for a, b in itertools.pairwise(runs)]
        allowed = [i for i, load in enumerate(merged) if load <= limit]
        # of equal costs the pair with the least load, so that runs grow evenly
        if allowed:
            place = max(allowed, key=lambda i: (cuts[i], -merged[i]))
        else:
            place = min(range(len(merged)), key=lambda i: (merged[i], -cuts[i]))
        runs[place : place + 2] = [merged[place]]
        del cuts[place], ends[place]
    return ends
