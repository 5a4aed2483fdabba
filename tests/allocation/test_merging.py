"""Layer-wise partitioning and merging (a reconstruction) against its exact counterpart."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.allocation import merge
from lightning_hybrid.allocation.merging import merge_exactly
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
    merged = merge([1, 1, 1, 1], [1, 9, 1], 3)
    assert merged.ends == (1, 3, 4)
    assert merged.history == (11, 2)


def test_a_merge_that_would_be_too_heavy_is_left_out() -> None:
    merged = merge([3, 3, 1, 1], [9, 1, 1], 2, slack=0.25)  # 6 > 1.25 * 8 / 2
    assert merged.ends == (1, 4)
    assert not merged.exceeded


def test_a_limit_that_cannot_be_kept_is_reported_with_its_reason() -> None:
    merged = merge([2, 2, 2], [1, 1], 2, slack=0.2)
    assert max(merged.loads) == 4 > merged.limit
    assert "3 runs left and 2 wanted" in merged.exceeded
    assert "one partition alone has 9" in merge([9, 1, 1], [1, 1], 2).exceeded


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 20), st.data())
def test_merging_ends_with_k_runs_and_cuts_never_cost_more(seed: int, n: int, data: Any) -> None:
    count = data.draw(st.integers(1, n))
    loads, cuts = chain(seed, n)
    merged = merge(loads, cuts, count)
    assert len(merged.ends) == count == len(merged.loads)
    assert merged.ends[-1] == n
    assert sum(merged.loads) == pytest.approx(sum(loads))
    assert all(b <= a + 1e-12 for a, b in pairwise(merged.history))
    assert len(merged.history) == n - count + 1
    assert bool(merged.exceeded) == (max(merged.loads) > merged.limit * (1 + 1e-9))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 8), st.data())
def test_exact_merging_equals_brute_force(seed: int, n: int, data: Any) -> None:
    count = data.draw(st.integers(1, n))
    loads, cuts = chain(seed, n)
    exact = merge_exactly(loads, cuts, count)
    assert exact.value == pytest.approx(brute_force(loads, cuts, count))
    assert exact.value <= merge(loads, cuts, count).value + 1e-9


def test_merging_one_and_all() -> None:
    loads, cuts = chain(0, 6)
    for solve in (merge, merge_exactly):
        assert solve(loads, cuts, 1).ends == (6,)
        assert solve(loads, cuts, 6).ends == (1, 2, 3, 4, 5, 6)


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
