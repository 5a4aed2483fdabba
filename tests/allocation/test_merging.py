"""Layer-wise partitioning and merging (a reconstruction)."""

from itertools import pairwise
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


def test_the_most_expensive_cut_is_closed_first() -> None:
    assert merge([1, 1, 1, 1], [1, 9, 1], 3) == [1, 3, 4]


def test_a_merge_that_would_be_too_heavy_is_left_out() -> None:
    assert merge([3, 3, 1, 1], [9, 1, 1], 2, slack=0.25) == [1, 4]  # 6 > 1.25 * 8 / 2


def test_where_no_merge_keeps_to_the_limit_the_lightest_two_are_merged() -> None:
    assert merge([2, 2, 1], [9, 1], 2, slack=0.0) == [1, 3]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 20), st.data())
def test_merging_ends_with_k_runs(seed: int, n: int, data: Any) -> None:
    count = data.draw(st.integers(1, n))
    ends = merge(*chain(seed, n), count)
    assert len(ends) == count
    assert ends[-1] == n
    assert all(a < b for a, b in pairwise([0, *ends]))


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
