"""Loops: the closed form of their step, and the cuts that are chosen."""

from dataclasses import replace
from itertools import combinations

import pytest
from planned import planned, simulate, step_problem

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.looped_placements import best_loop
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.schedules.looped import loop_order, looped


def problem(loads: list[float], devices: int, microbatches: int = 4) -> StepProblem:
    return step_problem(
        forward_s=loads,
        backward_s=[2 * load for load in loads],
        cut_bytes=[0.0] * (len(loads) - 1),
        speeds=[1.0] * devices,
        links=LinkCosts.equal(devices, float("inf")),
        microbatches=microbatches,
    )


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_v_rounds_divide_the_bubble_by_v(devices: int, rounds: int, more: int) -> None:
    """(M + (S - 1) / v)(F + B), for S devices and M >= S micro-batches."""
    m, stages = devices + more, devices * rounds
    timeline = simulate(
        looped(stages, m),
        [1 / rounds] * stages,
        [2 / rounds] * stages,
        devices=loop_order(devices, rounds),
    )
    # in rounds of S micro-batches; what is left over fills one round only in part
    if m % devices == 0:
        assert timeline.makespan_s == pytest.approx((m + (devices - 1) / rounds) * 3)
    assert timeline.makespan_s <= (m + devices - 1) * 3 + 1e-9


def test_the_cuts_of_a_small_loop_are_the_best_of_all() -> None:
    given = problem([3.0, 1.0, 2.0, 1.0, 1.0, 4.0, 2.0, 2.0, 1.0], 2, microbatches=3)
    ends, devices = best_loop(given)
    rounds = len(devices) // 2
    best = min(
        given.step_time_s([*cuts, given.n], devices)
        for cuts in combinations(range(1, given.n), 2 * rounds - 1)
    )
    assert given.step_time_s(ends, devices) == pytest.approx(best)
    assert devices == [1, 0] * rounds


def test_a_loop_is_planned_by_name() -> None:
    names = [f"part{n}" for n in range(8)]
    arguments = {
        "names": names,
        "forward_s": [1.0] * 8,
        "backward_s": [2.0] * 8,
        "cut_bytes": [0.0] * 7,
        "parameters": [1] * 8,
        "layers": [1] * 8,
        "replicas": 1,
        "stages": 2,
        "microbatches": 4,
        "schedule": "looped",
    }
    plan = planned(**arguments)
    rounds = plan.stages // 2
    assert plan.devices == (1, 0) * rounds
    assert plan.devices_per_replica == 2
    assert plan.predicted_step_s == pytest.approx((4 + 1 / rounds) * 4 * 3)
    given = planned(**arguments, cut_points=["part2", "part4", "part6"])
    assert given.devices == (1, 0, 1, 0)
    with pytest.raises(PlanError, match=r"3 or 5 \.\.\. cut points, not 2"):
        planned(**arguments, cut_points=["part2", "part4"])


def test_a_network_of_few_partitions_has_no_loop() -> None:
    with pytest.raises(PlanError, match=r"2 devices .* two stages.*3 partitions, of which 4"):
        best_loop(replace(problem([1.0] * 3, 2)))


@pytest.mark.parametrize("schedule", ["1f1b_stream", "pipedream", "fdg"])
def test_a_streamed_plan_predicts_the_slowest_stage(schedule: str) -> None:
    plan = planned(
        names=[f"part{n}" for n in range(6)],
        forward_s=[1.0] * 6,
        backward_s=[2.0] * 6,
        cut_bytes=[0.0] * 5,
        parameters=[1] * 6,
        layers=[1] * 6,
        replicas=1,
        stages=3,
        microbatches=1,
        schedule=schedule,
    )
    assert plan.cuts == ("part2", "part4")
    assert plan.predicted_step_s == pytest.approx(2 * 3.0)
    delays = {"1f1b_stream": (0, 0, 0), "pipedream": (2, 1, 0), "fdg": (3, 1, 0)}
    assert plan.delays == delays[schedule]
