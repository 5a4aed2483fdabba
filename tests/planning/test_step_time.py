from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.simulate import simulate
from lightning_hybrid.planning.step_time import StepCosts, fill_drain_s
from lightning_hybrid.schedules.zero_bubble import zero_bubble


def simulated_s(costs: StepCosts, microbatches: int) -> float:
    split = [stage for stage, weight_s in enumerate(costs.weight_s) if weight_s]
    schedule = zero_bubble(len(costs.forward_s), microbatches, split=split)
    return simulate(schedule, costs).makespan_s


def drawn(data: Any, stages: int, devices: Any) -> StepCosts:
    def times(count: int) -> Any:
        return data.draw(st.lists(st.floats(0, 9), min_size=count, max_size=count))

    return StepCosts(
        times(stages), times(stages), devices, times(stages - 1), times(stages - 1),
        times(stages), times(stages),
    )  # fmt: skip


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_a_chain_takes_what_its_events_take(data: Any, stages: int, microbatches: int) -> None:
    costs = drawn(data, stages, data.draw(st.permutations(range(stages))))
    assert fill_drain_s(costs, microbatches) == pytest.approx(simulated_s(costs, microbatches))


@settings(max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_split_backwards_take_what_their_events_take(
    data: Any, stages: int, microbatches: int
) -> None:
    costs = drawn(data, stages, range(stages))
    weights = st.sampled_from([0.0]) | st.floats(0.1, 9)
    costs = replace(costs, weight_s=[0.0, *(data.draw(weights) for _ in range(stages - 1))])
    assert fill_drain_s(costs, microbatches) == pytest.approx(simulated_s(costs, microbatches))


@settings(max_examples=60)
@given(st.data(), st.lists(st.integers(0, 2), min_size=2, max_size=8), st.integers(1, 6))
def test_stages_that_share_devices_take_what_their_events_take(
    data: Any, places: list[int], microbatches: int
) -> None:
    names = sorted(set(places))
    costs = drawn(data, len(places), [names.index(place) for place in places])
    assert fill_drain_s(costs, microbatches) == pytest.approx(simulated_s(costs, microbatches))


def test_a_thousand_devices_are_no_matter_of_seconds() -> None:
    stages = 1024
    costs = StepCosts([1.0] * stages, [2.0] * stages, range(stages), [0.5] * (stages - 1))
    # (M + S - 1) (F + B), and every message twice
    assert fill_drain_s(costs, 64) == 3 * (64 + stages - 1) + 2 * 0.5 * (stages - 1)
    # a loop: with fewer micro-batches than devices a device's two stages never meet
    devices = [k % stages for k in range(2 * stages)]
    costs = StepCosts([0.5] * 2 * stages, [1.0] * 2 * stages, devices)
    assert fill_drain_s(costs, 64) == 1.5 * (64 + 2 * stages - 1)


def test_latency_delays_a_message_and_not_the_next_one() -> None:
    costs = StepCosts([1.0, 1.0], [0.0, 0.0], [1, 0], latency_s=[10.0])
    assert fill_drain_s(costs, 3) == 1 + 10 + 3 + 10
    occupied = StepCosts([1.0, 1.0], [0.0, 0.0], [1, 0], send_s=[10.0])
    assert fill_drain_s(occupied, 3) == 1 + 30 + 1 + 30


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=7), st.integers(1, 5))
def test_more_work_never_shortens_a_step(times: list[float], microbatches: int) -> None:
    longer = [times[0] + 1, *times[1:]]
    before, after = (
        fill_drain_s(StepCosts(f, f, range(len(f))), microbatches) for f in (times, longer)
    )
    assert before < after


def test_lists_of_another_length_are_refused() -> None:
    with pytest.raises(PlanError, match="send_s has 2 entries, 1 are needed"):
        StepCosts([1.0, 1.0], [1.0, 1.0], [0, 1], [1.0, 1.0])
    with pytest.raises(PlanError, match="share devices"):
        StepCosts([1.0] * 3, [1.0] * 3, [0, 1, 0], weight_s=[0.0, 1.0, 0.0])
    with pytest.raises(PlanError, match="devices has 0 entries, 2 are needed"):
        StepCosts([1.0, 1.0], [1.0, 1.0], [])
