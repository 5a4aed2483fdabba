from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_rules import check, draw

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import Instruction, InstructionKind, Schedule
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import execute

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9))


def kinds(instructions: tuple[Instruction, ...], kind: InstructionKind) -> list[int]:
    return [i.microbatch for i in instructions if i.kind is kind]


@given(shapes, st.booleans())
def test_every_gpipe_schedule_can_be_run_and_does_all_work_once(
    shape: tuple[int, int], input_gradient: bool
) -> None:
    check(gpipe(*shape, input_gradient=input_gradient))


def test_gpipe_looks_like_its_drawing() -> None:
    assert draw(gpipe(3, 4)).splitlines() == [
        "stage 0   0 1 2 3 . . | . . 3 2 1 0",
        "stage 1   . 0 1 2 3 . | . 3 2 1 0 .",
        "stage 2   . . 0 1 2 3 | 3 2 1 0 . .",
    ]


def test_one_stage_sends_and_receives_nothing() -> None:
    schedule = gpipe(1, 2, input_gradient=True)
    assert [str(i) for i in schedule.forward[0]] == ["forward(0)", "forward(1)"]
    assert [str(i) for i in schedule.backward[0]] == ["backward(1)", "reduce(0)", "backward(0)"]


def test_the_driver_sends_all_inputs_before_it_waits() -> None:
    driver = gpipe(3, 2).forward[-1]
    assert [i.kind for i in driver[:2]] == [InstructionKind.SEND_INPUT] * 2
    assert driver[2] == Instruction(InstructionKind.RECEIVE_ACTIVATION, 0)


def test_gradients_arrive_in_the_order_in_which_autograd_adds_them() -> None:
    for stage in gpipe(3, 4).backward:
        assert kinds(stage, InstructionKind.BACKWARD) == [3, 2, 1, 0]


def test_the_reduction_begins_with_the_last_backward() -> None:
    for stage in gpipe(3, 4).backward:
        position = stage.index(Instruction(InstructionKind.REDUCE, 0))
        assert stage[position + 1] == Instruction(InstructionKind.BACKWARD, 0)
        assert InstructionKind.BACKWARD not in [i.kind for i in stage[position + 2 :]]


def test_the_input_gradient_comes_back_to_the_driver_only_when_wanted() -> None:
    wanted, unwanted = gpipe(2, 3, input_gradient=True), gpipe(2, 3)
    assert kinds(wanted.backward[-1], InstructionKind.RECEIVE_INPUT_GRADIENT) == [2, 1, 0]
    assert kinds(wanted.backward[0], InstructionKind.SEND_GRADIENT) == [2, 1, 0]
    assert kinds(unwanted.backward[0], InstructionKind.SEND_GRADIENT) == []


def test_the_driver_closes_the_ring() -> None:
    assert Instruction(InstructionKind.SEND_INPUT, 0).peer(2, 3) == 0
    assert Instruction(InstructionKind.RECEIVE_ACTIVATION, 0).peer(0, 3) == 2
    assert Instruction(InstructionKind.SEND_GRADIENT, 0).peer(0, 3) == 2
    assert Instruction(InstructionKind.RECEIVE_GRADIENT, 0).peer(1, 3) == 2


def broken(schedule: Schedule, stage: int, instructions: tuple[Instruction, ...]) -> Schedule:
    lists = list(schedule.forward)
    lists[stage] = instructions
    return replace(schedule, forward=tuple(lists))


def test_a_missing_send_is_a_deadlock_that_names_who_waits() -> None:
    schedule = gpipe(2, 2)
    without = tuple(i for i in schedule.forward[0] if str(i) != "send_activation(1)")
    with pytest.raises(PlanError, match=r"deadlock.*stage 1 at receive_activation\(1\)"):
        check(broken(schedule, 0, without))


def test_a_driver_that_waits_before_it_feeds_is_a_deadlock() -> None:
    schedule = gpipe(2, 1)
    feed, *rest = schedule.forward[1]
    with pytest.raises(PlanError, match="deadlock"):
        check(broken(schedule, 1, (*rest, feed)))


def test_messages_out_of_order_are_refused() -> None:
    schedule = gpipe(2, 2)
    feed0, feed1, *rest = schedule.forward[1]
    with pytest.raises(PlanError, match=r"expects receive_activation\(0\).*send_input\(1\)"):
        check(broken(schedule, 1, (feed1, feed0, *rest)))


def test_a_message_nobody_takes_is_refused() -> None:
    schedule = gpipe(2, 1)
    extra = (*schedule.forward[0], Instruction(InstructionKind.SEND_ACTIVATION, 1))
    with pytest.raises(PlanError, match=r"stage 1 never receives send_activation\(1\)"):
        check(broken(schedule, 0, extra))


def test_work_done_twice_is_refused() -> None:
    schedule = gpipe(1, 2)
    twice = (*schedule.forward[0], Instruction(InstructionKind.FORWARD, 1))
    with pytest.raises(PlanError, match=r"micro-batches \[0, 1, 1\]"):
        check(broken(schedule, 0, twice))


def test_a_schedule_has_one_list_per_stage() -> None:
    with pytest.raises(PlanError, match=r"1 forward lists for stages\(2\)"):
        check(replace(gpipe(2, 1), forward=gpipe(1, 1).forward))


@given(shapes)
def test_execution_keeps_the_order_of_every_stage(shape: tuple[int, int]) -> None:
    lists = gpipe(*shape).forward
    events = list(execute(lists))
    for stage, instructions in enumerate(lists):
        assert [i for s, i in events if s == stage] == list(instructions)


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-2, 4)])
def test_sizes_below_one_are_refused_with_their_value(stages: int, microbatches: int) -> None:
    with pytest.raises(PlanError, match=r"\((0|-2)\) must be at least 1"):
        gpipe(stages, microbatches)
