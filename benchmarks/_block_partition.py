"""Split a chain into runs with the least largest sum, as torchgpipe balances measured times.

Run: python benchmarks/block_partition.py, which shows it on an example.
"""

from collections.abc import Sequence


def block_partition(weights: Sequence[float], count: int) -> list[int]:
    """Ends of `count` runs with the least largest sum: bisection over that sum, runs filled up."""

    def filled(limit: float) -> list[int] | None:
        ends, total = [], 0.0
        for number, weight in enumerate(weights):
            # a later run must not go without
            left = len(weights) - number == count - len(ends) - 1
            if number and (left or total + weight > limit):
                ends.append(number)
                total = 0.0
            total += weight
            if total > limit:
                return None
        return [*ends, len(weights)] if len(ends) < count else None

    low, high = max(weights), sum(weights)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if filled(middle) else (middle, high)
    ends = filled(high)
    assert ends is not None
    return ends


if __name__ == "__main__":
    times = [3, 1, 4, 1, 5, 9, 2, 6]
    print(f"{times} in 3 runs: they end at {block_partition(times, 3)}")
