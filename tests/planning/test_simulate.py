from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import simulate

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import InstructionKind
from lightning_hybrid.schedules.gpipe import gpipe

stages_ = st.integers(1, 6)
microbatches_ = st.integers(1, 9)


@given(stages_, microbatches_)
def test_a_balanced_gpipe_has_the_textbook_bubble(stages: int, microbatches: int) -> None:
    timeline = simulate(gpipe(stages, microbatches), [1.0] * stages, [2.0] * stages)
    assert timeline.bubble == (stages - 1) / (microbatches + stages - 1)
    assert timeline.makespan_s == 3 * (microbatches + stages - 1)


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), microbatches_)
def test_without_transfers_the_slowest_stage_sets_the_pace(
    durations: list[int], microbatches: int
) -> None:
    stages = len(durations)
    timeline = simulate(gpipe(stages, microbatches), durations, [0.0] * stages)
    assert timeline.makespan_s == sum(durations) + (microbatches - 1) * max(durations)


@given(st.data(), stages_, microbatches_)
def test_the_bounds_of_every_step_hold(data: Any, stages: int, microbatches: int) -> None:
    times = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    forward, backward = data.draw(times), data.draw(times)
    timeline = simulate(gpipe(stages, microbatches), forward, backward, send_s=1.0)
    work = [microbatches * (f + b) for f, b in zip(forward, backward)]
    assert list(timeline.busy_s) == work
    assert max(work) <= timeline.makespan_s
    assert timeline.makespan_s >= sum(forward) + sum(backward) + 2 * (stages - 1)


def test_a_slow_link_carries_one_message_at_a_time() -> None:
    timeline = simulate(gpipe(2, 3), [1.0, 1.0], [0.0, 0.0], send_s=[10.0])
    # The first activation arrives at 1 + 10, the third at 1 + 30; gradients queue up likewise.
    sends = [e for e in timeline.events if e.instruction.kind is InstructionKind.SEND_ACTIVATION]
    assert [e.end_s for e in sends] == [11.0, 21.0, 31.0]
    assert timeline.makespan_s == 31 + 1 + 30


def test_the_reduction_runs_beside_the_last_backward() -> None:
    def step_s(reduce_s: float) -> float:
        return simulate(gpipe(1, 2), [1.0], [4.0], reduce_s=reduce_s).makespan_s

    assert step_s(0.0) == step_s(4.0) == 10
    assert step_s(5.0) == 11


def test_the_step_follows_the_reduction_and_counts_as_work() -> None:
    timeline = simulate(gpipe(1, 1), [1.0], [1.0], reduce_s=2.0, step_s=3.0)
    assert timeline.makespan_s == 1 + 2 + 3
    assert timeline.busy_s == (5.0,)


def test_events_of_a_stage_follow_each_other() -> None:
    timeline = simulate(gpipe(3, 2), [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], send_s=0.5)
    for stage in range(3):
        work = [e for e in timeline.events if e.stage == stage]
        work = [
            e
            for e in work
            if e.instruction.kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD)
        ]
        assert all(a.end_s <= b.start_s for a, b in pairwise(work))


def test_stages_on_one_device_take_turns() -> None:
    alone = simulate(gpipe(1, 3), [4.0], [8.0])
    shared = simulate(gpipe(4, 3), [1.0] * 4, [2.0] * 4, devices=[0, 0, 0, 0], send_s=9.0)
    assert shared.makespan_s == alone.makespan_s == 36  # what they hand each other is there at once
    assert shared.busy_s == (36.0,)
    assert shared.bubble == 0.0


def test_a_loop_over_the_devices_fills_and_drains_in_smaller_steps() -> None:
    chain = simulate(gpipe(2, 4), [2.0] * 2, [4.0] * 2)
    loop = simulate(gpipe(4, 4), [1.0] * 4, [2.0] * 4, devices=[1, 0, 1, 0])
    assert loop.busy_s == chain.busy_s == (24.0, 24.0)
    assert chain.makespan_s == 24 + 6
    assert loop.makespan_s == 24 + 3


@given(st.permutations(range(4)), microbatches_)
def test_the_numbers_of_the_devices_do_not_matter(devices: list[int], microbatches: int) -> None:
    times = [1.0, 3.0, 2.0, 5.0]
    usual = simulate(gpipe(4, microbatches), times, times, send_s=1.0)
    other = simulate(gpipe(4, microbatches), times, times, send_s=1.0, devices=devices)
    assert other.makespan_s == usual.makespan_s
    assert other.busy_s == tuple(usual.busy_s[devices.index(j)] for j in range(4))


def test_a_device_steps_and_reduces_for_all_its_stages() -> None:
    timeline = simulate(gpipe(2, 1), [1.0] * 2, [1.0] * 2, devices=[0, 0], step_s=3.0)
    assert timeline.makespan_s == 4 + 6
    timeline = simulate(gpipe(2, 1), [1.0] * 2, [1.0] * 2, devices=[0, 0], reduce_s=5.0)
    assert timeline.makespan_s == 2 + 5 + 5  # from the start of the last stage's backward


@pytest.mark.parametrize("devices", [[0, 2], [1, 1]])
def test_devices_without_a_stage_are_refused(devices: list[int]) -> None:
    with pytest.raises(PlanError, match="must name one of 0, 1"):
        simulate(gpipe(2, 1), [1.0] * 2, [1.0] * 2, devices=devices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backward_s": [1.0]}, "backward_s has 1 entries, 2 are needed"),
        ({"send_s": [1.0, 1.0]}, "send_s has 2 entries, 1 are needed"),
    ],
)
def test_wrong_times_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    times = {"forward_s": [1.0, 1.0], "backward_s": [1.0, 1.0]} | changes
    with pytest.raises(PlanError, match=message):
        simulate(gpipe(2, 2), **times)
