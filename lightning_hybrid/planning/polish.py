"""Move cuts while the simulator predicts a shorter step.

The allocation minimises the time of the slowest device, where each cut is paid for in full on both
sides. A step is more than that: messages travel while devices compute, and with few micro-batches
the filling and draining counts. So the last word on where exactly to cut has the predicted step.
"""

from collections.abc import Callable, Iterator, Sequence

_REACH = 3
"""Partitions by which a cut is moved at a time, at most."""


def polish(ends: Sequence[int], predict_s: Callable[[list[int]], float]) -> tuple[list[int], float]:
    """Move cuts, one or two neighbours at a time, as long as that shortens the step.

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
    """Ends with one cut, or two that follow each other, moved by up to `_REACH` partitions."""
    for width in (1, 2):
        for first in range(len(ends) - width):
            for by in (*range(-_REACH, 0), *range(1, _REACH + 1)):
                near = ends.copy()
                near[first : first + width] = [end + by for end in near[first : first + width]]
                if all(a < b for a, b in zip([0, *near], near)):
                    yield near
