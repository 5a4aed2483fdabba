"""Move cuts while the simulator predicts a shorter step.

The allocation minimises the time of the slowest device, where each cut is paid for in full on both
sides. A step is more than that: messages travel while devices compute, and with few micro-batches
the filling and draining counts. So the last word on where exactly to cut has the predicted step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

_REACH = 3
"""Partitions by which a cut is moved at a time, at most."""


def polish(ends: Sequence[int], predict_s: Callable[[list[int]], float]) -> tuple[list[int], float]:
    """Move cuts, alone and together, as long as that shortens the step.

    Args:
        ends: For each stage the number after that of its last partition.
        predict_s: The predicted step for such ends, in seconds; infinite if they are not allowed.

    Returns:
        The ends, and their prediction. It is never above that of the ends given.
    """
    best, best_s = list(ends), predict_s(list(ends))
    while True:
        moved = min(((predict_s(near), near) for near in _near(best)), default=(best_s, best))
        if not moved[0] < best_s * (1 - 1e-6):
            return best, best_s
        best_s, best = moved


def _near(ends: list[int]) -> Iterator[list[int]]:
    """Ends of which a few cuts have been moved: each alone, two neighbours, a stretch together."""
    cuts = len(ends) - 1
    few = [*range(-_REACH, 0), *range(1, _REACH + 1)]
    steps = [{cut: by} for cut in range(cuts) for by in few]
    steps += [
        {cut: by, cut + 1: by_next} for cut in range(cuts - 1) for by in few for by_next in few
    ]
    steps += [
        dict.fromkeys(range(first, last), by)
        for first in range(cuts)
        for last in range(first + 3, cuts + 1)
        for by in (-1, 1)
    ]
    for step in steps:
        near = [end + step.get(cut, 0) for cut, end in enumerate(ends)]
        if all(a < b for a, b in pairwise([0, *near])):
            yield near
