from itertools import combinations, pairwise

import numpy as np
import pytest
from planned import step_problem

from lightning_hybrid.planning.balanced import balanced_ends
from lightning_hybrid.planning.fastest_cuts import best_chain, fair_ends
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem


def problem(n: int, m: int, seed: int = 0, **changes: object) -> StepProblem:
    rng = np.random.default_rng(seed)
    forward = rng.uniform(1, 3, n)
    values = {
        "forward_s": forward.tolist(),
        "backward_s": (2 * forward).tolist(),
        "cut_bytes": [0.0] * (n - 1),
        "speeds": [1.0] * m,
        "links": LinkCosts.equal(m, 1.0),
        "microbatches": 64,
    }
    return step_problem(**(values | changes))  # type: ignore[arg-type]


def slowest(work: list[float], ends: tuple[int, ...]) -> float:
    return max(sum(work[a:b]) for a, b in pairwise((0, *ends)))


@pytest.mark.parametrize("seed", range(5))
def test_the_slowest_stage_is_as_fast_as_that_of_the_best_of_all_cuts(seed: int) -> None:
    one = problem(10, 4, seed)
    work = [f + b for f, b in zip(one.table.forward_s, one.table.backward_s)]
    ends = balanced_ends(one, [1, 2, 3, 0])
    assert ends is not None
    best = min(slowest(work, (*cut, 10)) for cut in combinations(range(1, 10), 3))
    # a little more is taken where the whole step is then shorter
    assert slowest(work, tuple(ends)) <= 1.5 * best
    if one.step_time_s(ends, [1, 2, 3, 0]) > 1.05 * best_chain(one, [1, 2, 3, 0])[1]:
        pytest.fail("more than 5 % longer than the shortest step of a chain")


def test_a_device_of_half_the_speed_gets_half_the_work() -> None:
    one = problem(30, 2, forward_s=[1.0] * 30, backward_s=[2.0] * 30, speeds=[1.0, 0.5])
    assert balanced_ends(one, [1, 0]) == [10, 30]


def test_memory_binds() -> None:
    alike = {"forward_s": [1.0] * 4, "backward_s": [2.0] * 4, "memory_bytes": [1.0, 1.0, 1.0, 3.0]}
    assert balanced_ends(problem(4, 2, **alike, memory_limits=[3.0, 9.0]), [1, 0]) == [3, 4]
    assert balanced_ends(problem(4, 2, **alike, memory_limits=[2.0, 9.0]), [1, 0]) is None


def test_no_cut_lies_where_a_message_takes_longest() -> None:
    alike = {"forward_s": [1.0] * 4, "backward_s": [2.0] * 4, "cut_bytes": [0.0, 50.0, 0.0]}
    ends = balanced_ends(problem(4, 2, **alike), [1, 0])
    assert ends is not None
    assert ends[0] != 2


@pytest.mark.parametrize("seed", range(5))
def test_the_cuts_of_a_loop_are_no_slower_than_fair_shares_that_fit(seed: int) -> None:
    sizes = np.random.default_rng(seed).uniform(1, 3, 12).tolist()
    one = problem(12, 3, seed, memory_bytes=sizes, memory_limits=[0.5 * sum(sizes)] * 3)
    order = [1, 2, 0, 1, 2, 0]
    ends, fair = balanced_ends(one, order), fair_ends(one, order)
    assert ends is not None
    assert one.fits(ends, order)
    assert one.fits(fair, order)
    assert one.step_time_s(ends, order) <= one.step_time_s(fair, order)
