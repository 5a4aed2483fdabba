"""Layer-wise partitioning and merging (a reconstruction) beside what brute force finds."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.allocation import merge
from lightning_hybrid.errors import AllocationError


def chain(seed: int, n: int) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    return rng.uniform(0.1, 1.0, n).tolist(), rng.uniform(0.0, 0.2, n - 1).tolist()


def brute_force(loads: list[float], cuts: list[float], count: int) -> float:
    n = len(loads)
    return min(
        max(sum(loads[a:b]) for a, b in pairwise([0, *inner, n])) + sum(cuts[i - 1] for i in inner)
        for inner in combinations(range(1, n), count - 1)
    )


def test_the_most_expensive_cut_is_closed_first() -> None:
    assert merge([1, 1, 1, 1], [1, 9, 1], 3) == [1, 3, 4]


def test_a_merge_that_would_be_too_heavy_is_left_out() -> None:
    assert merge([3, 3, 1, 1], [9, 1, 1], 2, slack=0.25) == [1, 4]  # 6 > 1.25 * 8 / 2


def test_where_no_merge_keeps_the_limit_the_lightest_neighbours_are_merged() -> None:
    assert merge([2, 2, 2], [1, 1], 2, slack=0.2) == [2, 3]
    assert merge([9, 1, 1], [1, 1], 2) == [1, 3]


@settings(max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 9), st.data())
def test_merging_ends_with_k_runs_and_cuts_never_cost_more(seed: int, n: int, data: Any) -> None:
    count = data.draw(st.integers(1, n))
    loads, cuts = chain(seed, n)
    ends = merge(loads, cuts, count)
    assert len(set(ends)) == len(ends) == count
    assert ends == sorted(ends)
    assert ends[-1] == n
    runs = [sum(loads[a:b]) for a, b in pairwise([0, *ends])]
    left = sum(cuts[end - 1] for end in ends[:-1])
    assert left <= sum(cuts) + 1e-12
    assert max(runs) + left >= brute_force(loads, cuts, count) - 1e-9


def test_merging_one_and_all() -> None:
    loads, cuts = chain(0, 6)
    assert merge(loads, cuts, 1) == [6]
    assert merge(loads, cuts, 6) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("count", "loads", "message"),
    [
        (0, [1, 1], "2 partitions cannot be merged into 0"),
        (3, [1, 1], "2 partitions cannot be merged into 3"),
        (1, [1, -1], r"loads\[1\] is -1.0"),
    ],
)
def test_wrong_numbers_are_refused(count: int, loads: list[float], message: str) -> None:
    with pytest.raises(AllocationError, match=message):
        merge(loads, [1], count)
