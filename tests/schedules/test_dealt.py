"""Micro-batches dealt to copies of stages, against a run of their lists with traces for tensors."""

import random
from collections import Counter, deque
from collections.abc import Iterator

import pytest

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import (
    DealtSchedule,
    Instruction,
    InstructionKind,
    Schedule,
    StageCopy,
    deal,
    make_schedule,
    together,
)

NAMES = ("gpipe", "zero_bubble")


def shapes(most: int = 4) -> Iterator[tuple[int, ...]]:
    """All numbers of copies with so many ranks at most; the last stage has one."""

    def grow(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield (*shape, 1)
        for more in range(1, most - sum(shape)):
            yield from grow((*shape, more))

    yield from grow(())


def everything() -> Iterator[tuple[Schedule, DealtSchedule]]:
    for copies in shapes():
        for microbatches in range(1, 8):
            for name in NAMES:
                for wanted in (False, True):
                    schedule = make_schedule(name, len(copies), microbatches, input_gradient=wanted)
                    yield schedule, deal(schedule, copies)


class Ranks:
    """Ranks that follow their lists in a random order; what they send says where it has been.

    One queue leads from each rank to each other, so that a message that its receiver does not
    expect is taken by it all the same, and leaves its mark.
    """

    def __init__(self, dealt: DealtSchedule, *, seed: int) -> None:
        self.copies, self.random = dealt.copies, random.Random(seed)
        self.queues: dict[tuple[int, int], deque[list[object]]] = {}
        self.held: dict[tuple[int, str, int], list[object]] = {}
        self.outputs: dict[int, list[object]] = {}
        self.input_gradients: dict[int, list[object]] = {}
        self.computed: list[tuple[int, InstructionKind, int]] = []
        self.stage = [s for s, count in enumerate(dealt.copies) for _ in range(count)]
        self.first = [self.stage.index(s) for s in range(len(dealt.copies))]
        self.driver = self.first[-1]
        for lists in (dealt.forward, dealt.backward):
            self.run([deque(steps) for copies in lists for steps in copies])

    def rank(self, stage: int, microbatch: int) -> int:
        return self.first[stage] + microbatch % self.copies[stage]

    def run(self, lists: list[deque[Instruction]]) -> None:
        while any(lists):
            ready = [r for r, steps in enumerate(lists) if steps and self.ready(r, steps[0])]
            assert ready, "all wait"
            rank = self.random.choice(ready)
            self.take(rank, lists[rank].popleft())

    def source(self, rank: int, step: Instruction) -> int:
        stage = self.stage[rank]
        return {
            InstructionKind.RECEIVE_ACTIVATION: lambda: (
                self.rank(stage - 1, step.microbatch) if stage else self.driver
            ),
            InstructionKind.RECEIVE_GRADIENT: lambda: self.rank(stage + 1, step.microbatch),
            InstructionKind.RECEIVE_INPUT_GRADIENT: lambda: self.rank(0, step.microbatch),
        }[step.kind]()

    def ready(self, rank: int, step: Instruction) -> bool:
        return not step.kind.is_receive or bool(self.queues.get((self.source(rank, step), rank)))

    def take(self, rank: int, step: Instruction) -> None:
        stage, m, kind = self.stage[rank], step.microbatch, step.kind
        last = stage == len(self.copies) - 1
        if kind.is_receive:
            value = self.queues[self.source(rank, step), rank].popleft()
            if kind is InstructionKind.RECEIVE_INPUT_GRADIENT:
                self.input_gradients[m] = value
            else:
                self.held[rank, "x" if kind is InstructionKind.RECEIVE_ACTIVATION else "g", m] = (
                    value
                )
        elif kind is InstructionKind.FORWARD:
            x = self.held.pop((rank, "x", m), ["x", m])
            self.held[rank, "y", m] = [*x, stage]
            if last and rank == self.driver:
                self.outputs[m] = [*x, stage]
        elif kind is InstructionKind.BACKWARD:
            mine = last and rank == self.driver
            g = ["g", m] if mine else self.held.pop((rank, "g", m))
            self.held[rank, "dx", m] = [*g, stage]
        elif kind.is_send:
            self.send(rank, step)
        if kind.computes or kind is InstructionKind.REDUCE:
            self.computed.append((rank, kind, m))

    def send(self, rank: int, step: Instruction) -> None:
        stage, m = self.stage[rank], step.microbatch
        if step.kind is InstructionKind.SEND_INPUT:
            target, value = self.rank(0, m), ["x", m]
        elif step.kind is InstructionKind.SEND_GRADIENT:
            target = self.rank(stage - 1, m) if stage else self.driver
            value = self.held.pop((rank, "dx", m))
        else:
            target, value = self.rank(stage + 1, m), self.held.pop((rank, "y", m))
        assert target != rank
        self.queues.setdefault((rank, target), deque()).append(value)


def test_any_order_of_the_ranks_takes_each_microbatch_through_all_stages_and_back() -> None:
    for schedule, dealt in everything():
        microbatches, stages = schedule.microbatches, range(schedule.stages)
        ranks = Ranks(dealt, seed=microbatches)
        assert ranks.outputs == {m: ["x", m, *stages] for m in range(microbatches)}
        assert not any(ranks.queues.values())
        wanted = any(
            s.kind is InstructionKind.RECEIVE_INPUT_GRADIENT
            for s in schedule.backward[schedule.stages - 1]
        )
        assert ranks.input_gradients == {
            m: ["g", m, *reversed(stages)] for m in range(microbatches) if wanted
        }


def test_each_computation_is_done_once_by_the_copy_whose_turn_it_is() -> None:
    for schedule, dealt in everything():
        ranks = Ranks(dealt, seed=0)
        done = Counter(c for c in ranks.computed if c[1] is not InstructionKind.REDUCE)
        assert done == Counter(
            (ranks.rank(stage, step.microbatch), step.kind, step.microbatch)
            for lists in (schedule.forward, schedule.backward)
            for stage, steps in enumerate(lists)
            for step in steps
            if step.kind.computes
        )


def test_every_copy_reduces_once_beside_its_own_last_backward() -> None:
    for _, dealt in everything():
        for steps in (steps for copies in dealt.backward for steps in copies):
            kinds = [step.kind for step in steps]
            assert kinds.count(InstructionKind.REDUCE) == 1
            after = [
                step for step in steps[kinds.index(InstructionKind.REDUCE) :] if step.kind.computes
            ]
            works = any(kind.computes for kind in kinds)
            assert len(after) == works
            assert works or kinds == [InstructionKind.REDUCE]


def test_the_lists_pass_the_check_of_all_schedules() -> None:
    for _, dealt in everything():
        for lists in (dealt.forward, dealt.backward):
            assert len([*dealt.execute(lists)]) == sum(len(s) for copies in lists for s in copies)


def test_single_copies_leave_a_schedule_as_it_is() -> None:
    for stages in range(1, 5):
        for name in NAMES:
            schedule = make_schedule(name, stages, 3, input_gradient=True)
            dealt = deal(schedule, (1,) * stages)
            assert tuple(steps for (steps,) in dealt.forward) == schedule.forward
            assert tuple(steps for (steps,) in dealt.backward) == schedule.backward


@pytest.mark.parametrize("copies", [(2, 1), (3, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2, 1)])
def test_the_driver_may_have_a_copy_of_the_stage_before_its_own(copies: tuple[int, ...]) -> None:
    """What others wait for comes first, and nobody waits in a circle."""
    for microbatches in range(1, 8):
        schedule = make_schedule("gpipe", len(copies), microbatches, input_gradient=True)
        dealt = deal(schedule, copies)
        for lists in (dealt.forward, dealt.backward):
            assert Counter(dealt.execute(lists, collects=True)) == Counter(dealt.execute(lists))
    places = [StageCopy(len(copies) - 2, copies[-2] - 1), StageCopy(len(copies) - 1, 0)]
    stages = [place.stage for place, step in together(dealt.backward, places) if step.kind.computes]
    assert stages == sorted(stages, reverse=True)


def test_a_list_that_breaks_the_order_of_a_link_is_refused_by_its_copies() -> None:
    dealt = deal(make_schedule("gpipe", 2, 4), (2, 1))
    (first, second), *others = dealt.forward
    swapped = (*first[:1], first[3], *first[1:3], *first[4:])
    with pytest.raises(PlanError, match=r"stage 0, copy 0 expects receive_activation\(2\).*\(0\)"):
        [*dealt.execute(((swapped[1:] + swapped[:1], second), *others))]
    with pytest.raises(PlanError, match=r"deadlock.*stage 1, copy 0 at receive_activation\(1\)"):
        [*dealt.execute(((first, second[:1]), *others))]


@pytest.mark.parametrize(
    ("name", "stages", "copies", "said"),
    [
        (
            "1f1b_stream",
            2,
            (2, 1),
            r"copies\(2, 1\) .* 'gpipe' or 'zero_bubble', not '1f1b_stream'",
        ),
        ("looped", 4, (2, 1, 1, 1), "not 'looped'"),
        ("gpipe", 2, (2,), r"copies\(2,\) .* stages\(2\)"),
        ("gpipe", 2, (0, 1), r"copies\(0, 1\)"),
        ("gpipe", 1, (3,), "are replicas"),
        ("gpipe", 2, (1, 2), r"copies\(1, 2\): the last stage"),
    ],
)
def test_what_cannot_be_dealt_is_refused_by_name(
    name: str, stages: int, copies: tuple[int, ...], said: str
) -> None:
    schedule = make_schedule("gpipe" if name == "1f1b_stream" else name, stages, 2)
    with pytest.raises(PlanError, match=said):
        deal(Schedule(name, stages, 2, schedule.forward, schedule.backward), copies)
