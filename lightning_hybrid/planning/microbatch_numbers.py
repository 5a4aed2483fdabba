"""Into how many micro-batches a batch is split where the user has not said it.

If the sizes of the run are given, the number is :func:`default_number`. If they are left open too,
each of :func:`numbers_to_try` is one of the shapes that are ranked (`shapes.py`).

A micro-batch has at least two samples, if possible: on CPUs a convolution of a single sample takes
several times as long per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache


def default_number(devices: int, batch: int) -> int:
    """Return the number of micro-batches of a run whose sizes are given: twice ``devices``.

    It is smaller if micro-batches would have less than two samples, and at least 1.

    Args:
        devices: number of devices of a replica.
        batch: number of samples in a replica's batch.
    """
    return max(1, min(2 * devices, batch // 2))


def numbers_to_try(devices: int, batch: int, splits: Callable[[int], bool]) -> list[int]:
    """List the numbers of micro-batches among which a run with open sizes chooses, rising.

    Args:
        devices: number of devices of a replica; with one device there is one micro-batch.
        batch: number of samples in a replica's batch.
        splits: function from a number of micro-batches to whether a batch may be split so.
    """
    if devices == 1:  # there is no other stage to overlap with
        return [1]
    limit = max(batch // 2, min(batch, 2))
    tried = {2, devices, 2 * devices, 4 * devices, *divisors(batch, 4 * devices)} - {1}
    return [1, *filter(splits, (m for m in sorted(tried) if m <= limit))]


@lru_cache
def divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    """Return the divisors of a number, rising, up to ``most``."""
    return tuple(d for d in range(1, min(number, most or number) + 1) if number % d == 0)
