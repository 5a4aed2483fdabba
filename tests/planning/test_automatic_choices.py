"""`schedule="auto"` takes the exact schedule with the shortest step."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import Plan, StagePlan
from lightning_hybrid.planning.planner import plan_by_schedule, plan_within_memory
from lightning_hybrid.planning.step_time import MARGIN


class Planner:
    """Plans with given times by schedule; none for those left out."""

    def __init__(self, microbatches: int = 2, **step_s: float) -> None:
        self.step_s, self.asked, self.microbatches = step_s, [""][1:], microbatches

    def __call__(self, name: str) -> Plan:
        self.asked.append(name)
        if name not in self.step_s:
            raise PlanError("no such plan")
        return Plan(
            replicas=1,
            stages=2,
            microbatches=self.microbatches,
            schedule=name,
            cuts=("b",),
            predicted_step_s=self.step_s[name],
        )


def chosen(planner: Planner, schedule: str = "auto", **how: Any) -> str:
    how = {"contiguous": True, "measured": True} | how
    return plan_by_schedule(schedule, planner, **how).schedule


def test_the_shorter_step_is_taken() -> None:
    assert chosen(Planner(gpipe=1.0, zero_bubble=0.8)) == "zero_bubble"
    assert chosen(Planner(gpipe=1.0, looped=0.8), contiguous=False) == "looped"
    assert chosen(Planner(gpipe=1.0, zero_bubble=1.2)) == "gpipe"


def test_what_saves_less_than_a_prediction_is_worth_is_not_taken() -> None:
    assert chosen(Planner(gpipe=1.0, zero_bubble=1.01 - MARGIN)) == "gpipe"


def test_a_batch_that_is_not_split_is_summed_as_on_one_device() -> None:
    assert chosen(Planner(1, gpipe=1.0, zero_bubble=0.8)) == "gpipe"
    assert chosen(Planner(1, gpipe=1.0, looped=0.8), contiguous=False) == "gpipe"


def test_what_cannot_be_placed_is_not_taken() -> None:
    assert chosen(Planner(gpipe=1.0), contiguous=False) == "gpipe"
    with pytest.raises(PlanError):
        chosen(Planner())


def test_nothing_is_chosen_by_counts_and_no_streamed_schedule_ever() -> None:
    planner = Planner(gpipe=1.0, zero_bubble=0.1)
    assert chosen(planner, measured=False) == "gpipe"
    for contiguous in (True, False):
        chosen(planner, contiguous=contiguous)
    assert set(planner.asked) <= {"gpipe", "zero_bubble", "looped"}


def test_a_schedule_that_was_asked_for_is_taken() -> None:
    planner = Planner(gpipe=1.0, looped=9.0)
    assert chosen(planner, "looped") == "looped"
    assert planner.asked == ["looped"]


def held(step_s: float, *memory: int) -> Plan:
    """A plan of stages that hold so much."""
    rows = tuple(
        StagePlan(
            layers=1, partitions=(name,), parameters=1, load=0.5, device=device, memory_bytes=size
        )
        for name, device, size in zip("ab", (1, 0), memory)
    )
    return Plan(
        replicas=1, stages=2, microbatches=2, schedule="gpipe", cuts=("b",), rows=rows,
        predicted_step_s=step_s,
    )  # fmt: skip


def test_forwards_run_twice_where_cuts_by_memory_cost_more() -> None:
    plans = {False: held(2.0, 90, 20), True: held(1.5, 40, 40)}
    assert plan_within_memory("auto", plans.__getitem__, [100, 100]) is plans[True]
    assert plan_within_memory("auto", plans.__getitem__, [1000, 1000]) is plans[False]
    assert plan_within_memory("auto", plans.__getitem__) is plans[False]
    assert plan_within_memory(False, plans.__getitem__, [100, 100]) is plans[False]
    plans[True] = held(2.0, 40, 40)
    assert plan_within_memory("auto", plans.__getitem__, [100, 100]) is plans[False]


def test_stages_with_copies_are_looked_at_stage_by_stage() -> None:
    """Four devices have three stages, and memory is known of the least of each."""
    names, firsts = "abc", (1, 3, 0)
    plan = Plan(
        replicas=1,
        stages=3,
        microbatches=2,
        schedule="gpipe",
        cuts=("b", "c"),
        devices=((1, 2), 3, 0),
        rows=tuple(
            StagePlan(
                layers=1, partitions=(n,), parameters=1, load=0.3, device=d, memory_bytes=size
            )
            for n, d, size in zip(names, firsts, (90, 10, 10))
        ),
        predicted_step_s=2.0,
    )
    plans = {False: plan, True: replace(plan, predicted_step_s=1.5)}
    assert plan_within_memory("auto", plans.__getitem__, [100, 100, 100]) is plans[True]
    assert plan_within_memory("auto", plans.__getitem__, [100, 1000, 100]) is plans[False]


def test_forwards_run_twice_where_nothing_else_fits() -> None:
    def plan_with(recompute: bool) -> Plan:
        if not recompute:
            raise PlanError("too large")
        return held(9.0, 40, 40)

    assert plan_within_memory("auto", plan_with, [50, 50]).step_s == 9
