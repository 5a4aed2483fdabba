"""Stages are split where that makes the step shorter, and only there."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import planned, simulate

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.partition_table import TiedWeight
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.schedules.zero_bubble import zero_bubble


def plan(n: int = 6, **changes: Any) -> Plan:
    arguments: dict[str, Any] = {
        "names": [f"part{k}" for k in range(n)],
        "forward_s": [1.0] * n,
        "backward_s": [2.0] * n,
        "cut_bytes": [0.0] * (n - 1),
        "parameters": [1] * n,
        "layers": [1] * n,
        "replicas": 1,
        "stages": 3,
        "microbatches": 4,
        "schedule": "zero_bubble",
        "input_part_s": [1.0] * n,
        "weight_part_s": [1.0] * n,
    }
    return planned(**(arguments | changes))


def test_a_split_that_costs_nothing_shortens_the_drain_by_its_weight_parts() -> None:
    found = plan()
    assert found.split == (1, 2)
    assert found.predicted_step_s == (4 + 2) * 2 * 3 - 2 * 2
    assert [row["backward"] for row in found.table()] == ["joint", "split", "split"]
    assert "zero_bubble" in found.describe()


def test_where_a_split_costs_more_than_the_bubble_it_fills_no_stage_is_split() -> None:
    found = plan(weight_part_s=[2.0] * 6)
    assert found.split == ()
    assert found.predicted_step_s == plan(schedule="gpipe").predicted_step_s
    assert [row["backward"] for row in found.table()] == ["joint"] * 3


def test_a_stage_with_a_part_that_cannot_be_split_is_not() -> None:
    assert plan(weight_part_s=[1.0, 1.0, None, 1.0, 1.0, 1.0]).split == (2,)


def test_a_stage_that_uses_a_weight_twice_is_not() -> None:
    assert plan(tied=[TiedWeight(0.0, (1, 2))]).split == (1, 2)
    assert plan(tied=[TiedWeight(0.0, (2, 3))]).split == (2,)


def test_given_cuts_are_kept() -> None:
    found = plan(cut_points=["part1", "part2"])
    assert found.cuts == ("part1", "part2")
    assert set(found.split or ()) <= {1, 2}


times = st.lists(st.floats(0.1, 5), min_size=4, max_size=4)


@settings(max_examples=40)
@given(times, times, times, st.integers(1, 5))
def test_the_choice_is_the_best_of_all(
    forward: list[float], inputs: list[float], weights: list[float], microbatches: int
) -> None:
    """Of four stages with given cuts, by the simulator."""
    joint = [i + w / 2 for i, w in zip(inputs, weights)]  # a split takes half of W more
    found = plan(
        4,
        forward_s=forward,
        backward_s=joint,
        input_part_s=inputs,
        weight_part_s=weights,
        cut_points=["part1", "part2", "part3"],
        stages=4,
        microbatches=microbatches,
    )

    def took(split: tuple[int, ...]) -> float:
        return simulate(
            zero_bubble(4, microbatches, split=split),
            forward,
            [inputs[k] if k in split else joint[k] for k in range(4)],
            weight_s=[weights[k] if k in split else 0.0 for k in range(4)],
        ).makespan_s

    assert found.predicted_step_s == pytest.approx(took(found.split or ()))
    every = [s for count in range(4) for s in combinations((1, 2, 3), count)]
    assert found.predicted_step_s <= min(map(took, every)) * 1.02


def test_free_placements_are_not_split() -> None:
    with pytest.raises(PlanError, match="a device of its own"):
        plan(contiguous=False)


def test_a_plan_with_splits_reads_what_it_writes() -> None:
    found = plan(weight_part_s=[1.0, 1.0, None, 1.0, 1.0, 1.0])
    assert Plan.from_json(found.to_json()) == found


def test_plans_say_which_stages_are_split() -> None:
    shape: dict[str, Any] = {"replicas": 1, "stages": 3, "microbatches": 2, "cuts": ("b", "c")}
    assert Plan(**shape, schedule="zero_bubble").split == (1, 2)
    assert Plan(**shape, schedule="gpipe").split == ()
    with pytest.raises(PlanError, match=r"split\(0,\)"):
        Plan(**shape, schedule="zero_bubble", split=(0,))
    with pytest.raises(PlanError, match=r"split\(1,\).*'gpipe'"):
        Plan(**shape, schedule="gpipe", split=(1,))
    with pytest.raises(PlanError, match="a device of its own"):
        Plan(**shape, schedule="zero_bubble", devices=(0, 1, 0))
