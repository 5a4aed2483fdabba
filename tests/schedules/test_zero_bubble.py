from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import simulate
from schedule_rules import check, draw

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import Instruction, InstructionKind
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.zero_bubble import zero_bubble

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9))


@given(shapes, st.booleans(), st.data())
def test_every_zero_bubble_schedule_can_be_run_and_does_all_work_once(
    shape: tuple[int, int], input_gradient: bool, data: st.DataObject
) -> None:
    split = [stage for stage in range(1, shape[0]) if data.draw(st.booleans())]
    schedule = zero_bubble(*shape, input_gradient=input_gradient, split=split)
    check(schedule)
    has_weights = [
        any(i.kind is InstructionKind.WEIGHT for i in steps) for steps in schedule.backward
    ]
    assert [stage for stage, has in enumerate(has_weights) if has] == split


def test_zero_bubble_looks_like_its_drawing() -> None:
    assert draw(zero_bubble(3, 3)).splitlines() == [
        "stage 0   0 1 2 . . | . . 2 . 1 . 0",
        "stage 1   . 0 1 2 . | . 2 w 1 w 0 w",
        "stage 2   . . 0 1 2 | 2 w 1 w 0 w .",
    ]


def test_gradients_are_sent_before_the_weights_and_reduced_with_the_last_of_them() -> None:
    assert [str(i) for i in zero_bubble(3, 2).backward[1]] == [
        "receive_gradient(1)", "backward(1)", "send_gradient(1)", "weight(1)",
        "receive_gradient(0)", "backward(0)", "send_gradient(0)", "reduce(0)", "weight(0)",
    ]  # fmt: skip


def test_without_a_split_stage_it_is_fill_drain() -> None:
    assert zero_bubble(3, 4, split=()).backward == gpipe(3, 4).backward


@given(st.integers(1, 6), st.integers(1, 9), *[st.floats(0.1, 9)] * 3)
def test_of_equal_stages_the_drain_is_shorter_by_a_weight_part_for_each_but_one(
    stages: int, microbatches: int, f: float, b: float, w: float
) -> None:
    """The closed form: (M + S - 1) (F + B + W) - (S - 1) W."""
    took = simulate(
        zero_bubble(stages, microbatches),
        [f] * stages,
        [b + w, *[b] * (stages - 1)],
        weight_s=[0.0, *[w] * (stages - 1)],
    )
    closed = (microbatches + stages - 1) * (f + b + w) - (stages - 1) * w
    assert took.makespan_s == pytest.approx(closed)
    assert took.busy_s == pytest.approx((microbatches * (f + b + w),) * stages)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_that_nobody_waits_for_is_not_split(stage: int) -> None:
    with pytest.raises(PlanError, match=rf"split\({stage}\)"):
        zero_bubble(2, 2, split=[stage])


def test_a_weight_part_before_its_backward_is_refused() -> None:
    schedule = zero_bubble(2, 1)
    weight = Instruction(InstructionKind.WEIGHT, 0)
    steps = (weight, *(i for i in schedule.backward[1] if i != weight))
    wrong = replace(schedule, backward=(schedule.backward[0], steps))
    with pytest.raises(PlanError, match=r"weight\(0\) before backward\(0\)"):
        check(wrong)
