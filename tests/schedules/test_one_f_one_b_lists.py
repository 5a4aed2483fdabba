"""The lists of one forward, one backward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import simulate
from schedule_rules import check, draw

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import InstructionKind, make_schedule, one_f_one_b
from lightning_hybrid.schedules.gpipe import gpipe

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9))


@given(shapes, st.booleans())
def test_it_can_be_run_and_does_all_work_once(shape: tuple[int, int], falls: bool) -> None:
    check(one_f_one_b(*shape, falls=falls))


@given(shapes, st.booleans())
def test_a_stage_keeps_as_many_micro_batches_as_stages_follow(
    shape: tuple[int, int], falls: bool
) -> None:
    stages, microbatches = shape
    for stage, steps in enumerate(one_f_one_b(stages, microbatches, falls=falls).forward):
        kept = most = 0
        for step in steps:
            kept += (step.kind is InstructionKind.FORWARD) - (step.kind is InstructionKind.BACKWARD)
            most = max(most, kept)
        assert (kept, most) == (0, min(stages - stage, microbatches))


@given(shapes)
def test_messages_that_nobody_has_taken_are_no_more_than_stages(shape: tuple[int, int]) -> None:
    """So that a stage that waits for all but so many to be taken waits for nobody."""
    stages, microbatches = shape
    for stage, steps in enumerate(one_f_one_b(stages, microbatches).forward):
        done = dict.fromkeys(InstructionKind, 0)
        for step in steps:
            # the next stage has taken what it has sent a gradient for, the one before what must
            # have come before the newest activation
            sent, answered = (
                done[InstructionKind.SEND_ACTIVATION],
                done[InstructionKind.RECEIVE_GRADIENT],
            )
            if step.kind is InstructionKind.SEND_ACTIVATION and stage < stages - 1:
                assert sent - answered <= stages
            done[step.kind] += 1


def test_it_looks_like_its_drawing() -> None:
    assert draw(one_f_one_b(3, 4)).splitlines() == [
        "stage 0   0 1 2 . . 0 3 1 . 2 . 3 | ",
        "stage 1   . 0 1 . 0 2 1 3 2 . 3 . | ",
        "stage 2   . . 0 0 1 1 2 2 3 3 . . | ",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 3), (4, 8)])
def test_it_takes_as_long_as_fill_drain(stages: int, microbatches: int) -> None:
    times = [1.0] * stages, [2.0] * stages
    both = [make(stages, microbatches) for make in (one_f_one_b, gpipe)]
    one, other = (simulate(schedule, *times).makespan_s for schedule in both)
    assert one == other == (microbatches + stages - 1) * 3


def test_it_is_made_by_its_name_and_keeps_no_gradients_of_inputs() -> None:
    assert make_schedule("1f1b", 2, 3) == one_f_one_b(2, 3)
    with pytest.raises(PlanError, match="no gradients of the network's inputs"):
        make_schedule("1f1b", 2, 3, input_gradient=True)
