from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from lightning_hybrid.allocation import allocate
from lightning_hybrid.errors import AllocationError


def makespan(loads: Any, speeds: Any, costs: Any, order: Any, ends: Any) -> float:
    edge = [0.0, *costs, 0.0]
    runs = pairwise([0, *ends, len(loads)])
    return max(sum(loads[a:b]) / speeds[j] + edge[a] + edge[b] for (a, b), j in zip(runs, order))


@pytest.mark.parametrize("method", ["gabra", "exact"])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_ends_for_a_given_order(method: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads, speeds = rng.uniform(0.1, 1, 9), rng.uniform(0.3, 1, 4)
    costs, order = rng.uniform(0, 0.2, 8), rng.permutation(4).tolist()
    best = min(makespan(loads, speeds, costs, order, e) for e in combinations(range(1, 9), 3))
    found = allocate(loads, speeds, cut_costs=costs, device_order=order, method=method, seed=seed)
    assert found.value == pytest.approx(best)
    assert list(dict.fromkeys(found.assignment)) == order


@pytest.mark.parametrize("method", ["gabra", "exact"])
def test_limits_hold_in_a_given_order(method: Any) -> None:
    arguments: dict[str, Any] = {"memory_limits": [3, 1], "method": method}
    found = allocate([1] * 4, [1, 1], memory=[1] * 4, device_order=[1, 0], **arguments)
    assert found.assignment == (1, 0, 0, 0)
    with pytest.raises(AllocationError, match="larger devices"):
        allocate([1] * 3, [1, 1], memory=[2, 1, 1], device_order=[1, 0], **arguments)


@pytest.mark.parametrize(("order", "contiguous"), [([0, 0], True), ([0], True), ([0, 1], False)])
def test_what_is_no_order_is_refused(order: list[int], contiguous: bool) -> None:
    with pytest.raises(AllocationError, match=r"must name each of the devices 0\.\.1 once"):
        allocate([1, 1], [1, 1], device_order=order, contiguous=contiguous)
