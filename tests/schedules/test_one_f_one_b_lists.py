"""The lists of one forward, one backward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import simulate
from schedule_rules import check, draw

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import (
    InstructionKind,
    by_device,
    loop_order,
    make_schedule,
    most_in_loops,
    one_f_one_b,
)
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
    assert draw(one_f_one_b(3, 4, split=(1, 2))).splitlines() == [
        "stage 0   0 1 2 . . 0 3 1 . . 2 . 3 . | ",
        "stage 1   . 0 1 . 0 2 1 w 3 2 w 3 w w | ",
        "stage 2   . . 0 0 1 1 2 2 w 3 3 w w w | ",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 3), (4, 8)])
def test_it_takes_as_long_as_fill_drain(stages: int, microbatches: int) -> None:
    times = [1.0] * stages, [2.0] * stages
    both = [make(stages, microbatches) for make in (one_f_one_b, gpipe)]
    one, other = (simulate(schedule, *times).makespan_s for schedule in both)
    assert one == other == (microbatches + stages - 1) * 3


@given(shapes, st.booleans(), st.sets(st.integers(1, 5)))
def test_a_split_stage_keeps_something_of_no_more_micro_batches_than_there_are_stages(
    shape: tuple[int, int], falls: bool, split: set[int]
) -> None:
    stages, microbatches = shape
    split = {stage for stage in split if stage < stages}
    schedule = one_f_one_b(*shape, falls=falls, split=split)
    check(schedule)
    for stage, steps in enumerate(schedule.forward):
        ends = InstructionKind.WEIGHT if stage in split else InstructionKind.BACKWARD
        kept = most = 0
        for step in steps:
            kept += (step.kind is InstructionKind.FORWARD) - (step.kind is ends)
            most = max(most, kept)
        assert (kept, most <= min(stages, microbatches)) == (0, True)
        # averages begin right before the last gradient
        assert [s.kind for s in steps if s.kind in (InstructionKind.REDUCE, ends)][-2:] == [
            InstructionKind.REDUCE,
            ends,
        ]


@given(st.integers(1, 6), st.integers(0, 6))
def test_split_backwards_fill_the_bubble_as_in_zb_h1(stages: int, more: int) -> None:
    f, b, w, microbatches = 1.0, 1.1, 0.9, 2 * stages + more
    schedule = one_f_one_b(stages, microbatches, split=range(1, stages))
    parts = {"weight_s": [0.0, *[w] * (stages - 1)]}
    found = simulate(schedule, [f] * stages, [b + w, *[b] * (stages - 1)], **parts)
    expected = microbatches * (f + b + w) + (stages - 1) * (f + b - w)
    assert found.makespan_s == pytest.approx(expected)


loops = st.tuples(st.integers(2, 5), st.integers(2, 4), st.integers(1, 13))


@given(loops, st.booleans())
def test_a_loop_does_all_work_of_its_stages_and_begins_with_few_forwards(
    loop: tuple[int, int, int], falls: bool
) -> None:
    devices, rounds, microbatches = loop
    schedule = one_f_one_b(devices * rounds, microbatches, falls=falls)
    lists, _ = by_device(schedule, loop_order(devices, rounds))
    group = -(-microbatches // max(1, microbatches // devices))
    for device, steps in enumerate(lists):
        kept = most = 0
        for _, step in steps:
            kept += (step.kind is InstructionKind.FORWARD) - (step.kind is InstructionKind.BACKWARD)
            most = max(most, kept)
        place = (device - 1) % devices
        ahead = 2 * (devices - 1 - place) + (rounds - 1) * group + 1
        assert (kept, most) == (0, min(ahead, rounds * microbatches))
        assert most <= rounds * most_in_loops(devices, microbatches)
        for stage in {stage for stage, _ in steps}:
            kinds = (InstructionKind.SEND_INPUT, InstructionKind.REDUCE)
            own, alone = (
                sorted(map(str, (i for i in each if i.kind not in kinds)))
                for each in ([i for s, i in steps if s == stage], schedule.forward[stage])
            )
            assert own == alone


@given(loops)
def test_a_loop_takes_as_long_as_one_of_fill_drain(loop: tuple[int, int, int]) -> None:
    devices, rounds, more = loop
    stages, microbatches = devices * rounds, devices + more
    times = [1 / rounds] * stages, [2 / rounds] * stages
    schedule = one_f_one_b(stages, microbatches)
    found = simulate(schedule, *times, devices=loop_order(devices, rounds))
    assert found.makespan_s == pytest.approx(3 * (microbatches + (devices - 1) / rounds))


def test_it_is_made_by_its_name_and_keeps_no_gradients_of_inputs() -> None:
    assert make_schedule("1f1b", 2, 3) == one_f_one_b(2, 3)
    assert make_schedule("1f1b", 3, 3, split=(2,)) == one_f_one_b(3, 3, split=(2,))
    with pytest.raises(PlanError, match="no gradients of the network's inputs"):
        make_schedule("1f1b", 2, 3, input_gradient=True)
    with pytest.raises(PlanError, match=r"split\(0\) must be one of the stages 1..1"):
        make_schedule("1f1b", 2, 3, split=(0,))
