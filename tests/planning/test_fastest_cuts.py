"""The dynamic programme finds the chain of least step time."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import simulate, step_problem

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import fastest_cuts
from lightning_hybrid.planning.fastest_cuts import best_chain
from lightning_hybrid.planning.partition_table import TiedWeight
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.schedules.gpipe import gpipe


def problem(seed: int, n: int, m: int, microbatches: int, limited: bool = False) -> StepProblem:
    rng = np.random.default_rng(seed)

    def numbers(low: float, high: float, count: int) -> list[float]:
        return [float(x) for x in rng.uniform(low, high, count)]

    memory, limits = (numbers(0.1, 1, n), numbers(0.5, 1, m)) if limited else ([], [])
    room = 1.5 * sum(memory) / sum(limits) if limited else 1.0
    uses = (
        sorted(rng.choice(n, rng.integers(2, 4), replace=False).tolist()) if n > 3 else [0, n - 1]
    )
    return step_problem(
        forward_s=numbers(0.1, 1, n),
        backward_s=numbers(0.1, 2, n),
        cut_bytes=numbers(0, 1, n - 1),
        speeds=numbers(0.5, 1, m),
        links=LinkCosts(
            seconds_per_byte=[numbers(0.2, 0.8, m) for _ in range(m)],
            latency_s=[numbers(0, 0.02, m) for _ in range(m)],
        ),
        microbatches=microbatches,
        reduce_s=numbers(0, 1, n),
        step_s=numbers(0, 0.2, n),
        tied=[TiedWeight(2.0, tuple(uses), copy_bytes=0.3)] if seed % 2 else [],
        memory_bytes=memory,
        memory_limits=[room * limit for limit in limits],
    )


def order(m: int) -> list[int]:
    return [*range(1, m), 0]


@settings(max_examples=80)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 5), st.integers(1, 5),
       st.booleans())  # fmt: skip
def test_the_best_chain_equals_brute_force(
    seed: int, m: int, more: int, microbatches: int, limited: bool
) -> None:
    n = m + more
    found = problem(seed, n, m, microbatches, limited)
    cuts = combinations(range(1, n), m - 1)
    best = min(found.step_time_s([*inner, n], order(m)) for inner in cuts)
    if not np.isfinite(best):
        with pytest.raises(PlanError, match="keeps every device within its memory"):
            best_chain(found, order(m))
        return
    ends, step_s = best_chain(found, order(m))
    assert step_s == pytest.approx(best, rel=1e-9)
    assert step_s == found.step_time_s(ends, order(m))


def test_the_step_is_that_of_the_simulated_events() -> None:
    found = problem(2, 7, 3, 4)
    ends, step_s = best_chain(found, order(3))
    runs = list(pairwise([0, *ends]))
    places = order(3)

    def per_stage(values: Any, by_speed: bool = True) -> list[float]:
        sums = [sum(values[a:b]) for a, b in runs]
        return [s / found.speeds[j] if by_speed else s for s, j in zip(sums, places)]

    edges = list(zip(ends, pairwise(places)))
    timeline = simulate(
        gpipe(3, 4),
        per_stage(found.table.forward_s),
        per_stage(found.table.backward_s),
        devices=places,
        send_s=[
            found.table.cut_bytes[e - 1] * found.links.seconds_per_byte[i][j] for e, (i, j) in edges
        ],
        latency_s=[found.links.latency_s[i][j] for _, (i, j) in edges],
        reduce_s=per_stage(found.table.reduce_s, by_speed=False),
        step_s=per_stage(found.table.step_s),
    )
    assert step_s == pytest.approx(timeline.makespan_s)


def test_the_quick_pass_for_large_problems_comes_within_1_per_cent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(3):
        found = problem(seed, 60, 8, 8)
        best = best_chain(found, order(8))[1]
        with monkeypatch.context() as patch:
            patch.setattr(fastest_cuts, "_SMALL", 0)
            assert best <= best_chain(found, order(8))[1] <= 1.01 * best


def test_slow_messages_move_the_cut_to_where_little_crosses() -> None:
    plain: dict[str, Any] = {
        "forward_s": [1.0] * 4, "backward_s": [1.0] * 4, "cut_bytes": [1.0, 9.0, 1.0],
        "speeds": [1.0, 1.0], "microbatches": 4,
    }  # fmt: skip
    fast = step_problem(**plain, links=LinkCosts.equal(2, 1e9))
    slow = step_problem(**plain, links=LinkCosts.equal(2, 1.0))
    assert best_chain(fast, [1, 0])[0] == [2, 4]
    assert best_chain(slow, [1, 0])[0] in ([1, 4], [3, 4])
