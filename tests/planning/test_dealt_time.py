"""Simulated steps of stages with copies, against chains, recurrences and times by hand."""

import random
from functools import lru_cache

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.dealt_time import dealt_s
from lightning_hybrid.planning.simulate import DealtCosts, simulate, simulate_dealt
from lightning_hybrid.planning.step_time import StepCosts, fill_drain_s
from lightning_hybrid.schedules import InstructionKind, StageCopy, collected, deal, make_schedule

SHAPES = [(1,), (1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3), (2, 1, 1), (1, 2, 1), (1, 1, 2)]


def drawn(chance: random.Random, stages: int, *, messages: float) -> StepCosts:
    def some(count: int, most: float = 1.0) -> list[float]:
        return [chance.uniform(0, most) for _ in range(count)]

    return StepCosts(
        forward_s=some(stages),
        backward_s=some(stages, 2.0),
        devices=[*range(1, stages), 0],
        send_s=some(stages - 1, messages),
        latency_s=some(stages - 1, 0.3),
        reduce_s=some(stages, 3.0),
        step_s=some(stages),
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_single_copies_take_as_long_as_a_chain(stages: int) -> None:
    chance = random.Random(stages)
    for _ in range(20):
        costs, microbatches = drawn(chance, stages, messages=1.5), chance.randint(1, 7)
        got = dealt_s(DealtCosts.alike(costs, (1,) * stages), microbatches)
        assert got == pytest.approx(fill_drain_s(costs, microbatches), rel=1e-12)


def test_single_copies_with_split_backwards_take_as_long_as_a_chain() -> None:
    schedule, chance = make_schedule("zero_bubble", 3, 5), random.Random(0)
    base = drawn(chance, 3, messages=0.5)
    names = ("forward_s", "backward_s", "devices", "send_s", "latency_s", "reduce_s", "step_s")
    costs = StepCosts(**{n: getattr(base, n) for n in names}, weight_s=[0.0, 0.6, 0.9])
    got = simulate_dealt(deal(schedule, (1, 1, 1)), DealtCosts.alike(costs, (1, 1, 1)))
    assert got.makespan_s == pytest.approx(simulate(schedule, costs).makespan_s, rel=1e-12)


def recurrence(costs: StepCosts, copies: tuple[int, ...], microbatches: int) -> float:
    """The step where messages occupy no link: the time of (stage, micro-batch) is that of two
    others, the one before it in the network and the one before it on its copy."""
    f, b, late = costs.forward_s, costs.backward_s, costs.latency_s
    last, all_ = len(copies) - 1, range(microbatches)

    @lru_cache
    def forward(stage: int, m: int) -> float:
        if m < 0:
            return 0.0
        arrived = forward(stage - 1, m) + late[stage - 1] if stage else 0.0
        return max(arrived, forward(stage, m - copies[stage])) + f[stage]

    @lru_cache
    def begin(stage: int, m: int) -> float:
        if stage < last:
            arrived = begin(stage + 1, m) + b[stage + 1] + late[stage]
        else:
            arrived = max(forward(last, k) for k in all_)  # the loss wants all outputs
        later = m + copies[stage]
        before = begin(stage, later) + b[stage] if later < microbatches else 0.0
        latest = max(k for k in all_ if k % copies[stage] == m % copies[stage])
        return max(arrived, before, forward(stage, latest))

    finish = 0.0
    for stage, count in enumerate(copies):
        own = [m for m in range(count) if m < microbatches]
        reduced = max(begin(stage, m) for m in own) + costs.reduce_s[stage]
        ends = [begin(stage, m) + b[stage] for m in own]
        finish = max(finish, max(*ends, reduced) + costs.step_s[stage])
    return finish


@pytest.mark.parametrize("copies", SHAPES)
def test_messages_that_occupy_no_link_follow_the_recurrence(copies: tuple[int, ...]) -> None:
    chance = random.Random(sum(copies))
    for microbatches in range(1, 8):
        costs = drawn(chance, len(copies), messages=0.0)
        got = dealt_s(DealtCosts.alike(costs, copies), microbatches)
        assert got == pytest.approx(recurrence(costs, copies, microbatches), rel=1e-12)


def test_a_device_that_feeds_several_copies_sends_one_message_at_a_time() -> None:
    inputs = {(StageCopy(1, 0), StageCopy(0, i)): (1.0, 0.0) for i in range(3)}
    zero = [[0.0] * 3, [0.0]]
    costs = DealtCosts(
        forward_s=[[5.0] * 3, [0.0]],
        backward_s=zero,
        weight_s=zero,
        step_s=zero,
        reduce_s=[0.0, 0.0],
        edges=inputs,
    )
    events = simulate_dealt(deal(make_schedule("gpipe", 2, 3), (3, 1)), costs).events
    first = [
        e.start_s for e in events if e.stage == 0 and e.instruction.kind is InstructionKind.FORWARD
    ]
    assert sorted(first) == [1.0, 2.0, 3.0]


def test_gradients_travel_when_the_last_copy_has_begun_its_last_backward() -> None:
    """The slow copy begins its backward at 4, 3 s later than the fast one."""
    costs = DealtCosts(
        forward_s=[[1.0, 4.0], [0.0]],
        backward_s=[[1.0, 4.0], [0.0]],
        weight_s=[[0.0, 0.0], [0.0]],
        step_s=[[0.5, 0.5], [0.0]],
        reduce_s=[6.0, 0.0],
    )
    timeline = simulate_dealt(deal(make_schedule("gpipe", 2, 2), (2, 1)), costs)
    reduces = [
        e for e in timeline.events if e.stage == 0 and e.instruction.kind is InstructionKind.REDUCE
    ]
    assert [(e.copy, e.start_s, e.end_s) for e in reduces] == [(0, 4.0, 10.0), (1, 4.0, 10.0)]
    assert timeline.makespan_s == 10.5


def test_a_first_stage_with_three_times_the_work_is_hidden_by_three_copies() -> None:
    one, three = (
        StepCosts(forward_s=[3.0, 1.0], backward_s=[3.0, 1.0], devices=[1, 0]) for _ in "ab"
    )
    assert dealt_s(DealtCosts.alike(one, (1, 1)), 6) == 2 * (6 * 3 + 1)
    # the driver is fed by the three in turn: 3 s, then three micro-batches every 3 s
    assert dealt_s(DealtCosts.alike(three, (3, 1)), 6) == 2 * (3 + 3 + 3)


def test_costs_of_other_copies_are_refused_with_both() -> None:
    costs = StepCosts(forward_s=[1, 1], backward_s=[1, 1], devices=[1, 0])
    with pytest.raises(PlanError, match=r"copies\(2, 1\) .* copies\(3, 1\)"):
        simulate_dealt(deal(make_schedule("gpipe", 2, 3), (2, 1)), DealtCosts.alike(costs, (3, 1)))


@pytest.mark.parametrize("copies", [(2, 1), (2, 3, 1), (4, 2, 1), (1, 1), (1, 2), (2, 3)])
def test_the_time_without_events_is_that_of_the_lists(copies: tuple[int, ...]) -> None:
    chance, count = random.Random(len(copies)), range(len(copies))

    def some(most: float) -> list[list[float]]:
        return [[chance.uniform(0, most) for _ in range(copies[stage])] for stage in count]

    for microbatches in (1, 2, 5, 9):
        edges = {
            (StageCopy(stage, i), StageCopy(stage + 1, j)): (
                chance.choice((0.0, 0.7)),
                chance.random(),
            )
            for stage in count[:-1]
            for i in range(copies[stage])
            for j in range(copies[stage + 1])
        }
        # outputs of all copies of the last stage but the driver's go to the driver
        edges |= {
            (StageCopy(len(copies) - 1, i), StageCopy(len(copies), 0)): (
                chance.choice((0.0, 0.7)),
                0.3,
            )
            for i in range(copies[-1] - 1)
        }
        costs = DealtCosts(
            forward_s=some(1.0),
            backward_s=some(2.0),
            weight_s=[[0.0] * each for each in copies],
            step_s=some(1.0),
            reduce_s=[chance.uniform(0, 4) for _ in count],
            edges=edges,
        )
        stages = collected(copies)
        lists = deal(make_schedule("gpipe", len(stages), microbatches), stages)
        slow_s = simulate_dealt(lists, costs).makespan_s
        assert dealt_s(costs, microbatches) == pytest.approx(slow_s, rel=1e-12)
