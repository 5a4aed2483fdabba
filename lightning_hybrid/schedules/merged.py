"""Merge the instruction lists of several stages on one device into one.

A device executes one instruction at a time, and while it waits for a message it cannot send. So the
lists of its stages are merged by *ticks*. The tick of an instruction is the time at which it would
run if every stage had a device for itself, a forward or a backward took one tick and a message
none. A send has the tick of the computation before it, a receive the tick of the computation after
it, so the tick of a receive is always later than that of its send.

Devices that execute their instructions tick by tick therefore never wait for each other in a
circle. Of all waiting receives take one with the smallest tick: its send has a smaller tick, and so
have all instructions in front of this send; none of these is a waiting receive, so the send takes
place. And both ends of a link have its messages, of whatever stages, in the same order: that of the
ticks.
"""

from collections import deque
from collections.abc import Sequence

from lightning_hybrid.schedules.instructions import (
    Instruction,
    InstructionKind,
    Lists,
    PlacedInstruction,
    Schedule,
    execute,
)
from lightning_hybrid.schedules.looped import rounds_of
from lightning_hybrid.schedules.one_f_one_b import INSIDE, interleaved

Merged = tuple[tuple[PlacedInstruction, ...], ...]
"""By device, its instructions in order, as `(number of the stage, instruction)`."""


def by_device(schedule: Schedule, devices: Sequence[int]) -> tuple[Merged, Merged]:
    """Merge the lists of the stages into one list per device, for forward and backward pass.

    It is called for every schedule whose stages have one copy each. Lists are merged by ticks; but
    `1f1b` in a loop, without split backwards, has lists of its own: see `interleaved`.

    Args:
        schedule: The schedule.
        devices: By stage, the number of its device, from 0.

    Returns:
        `(lists of the forward pass, lists of the backward pass)`, each by device. Under `1f1b` the
        second lists are empty.

    Raises:
        PlanError: the lists cannot be run.
    """
    splits = any(
        step.kind is InstructionKind.WEIGHT for steps in schedule.forward for step in steps
    )
    if schedule.name == INSIDE and not splits and (rounds := rounds_of(devices)) > 1:
        order = [s.microbatch for s in schedule.forward[0] if s.kind is InstructionKind.FORWARD]
        lists = interleaved(len(devices) // rounds, rounds, order)
        return lists, ((),) * len(lists)
    return merge_lists(schedule.forward, devices), merge_lists(schedule.backward, devices)


def merge_lists(lists: Lists, devices: Sequence[int]) -> Merged:
    """Merge the stages' lists of a forward or backward pass into one list per device, by ticks.

    Args:
        lists: By stage, its instructions.
        devices: By stage, the number of its device, from 0.

    Returns:
        By device, its instructions. Those of one stage keep their order; within one tick those of
        earlier stages come first.

    Raises:
        PlanError: the lists cannot be run.
    """
    if len(set(devices)) == len(devices):  # nothing to merge
        order = sorted(range(len(devices)), key=devices.__getitem__)
        return tuple(tuple((stage, step) for step in lists[stage]) for stage in order)
    ticks = _ticks(lists)
    merged = []
    for device in range(max(devices) + 1):
        steps = [
            (tick, stage, instruction)
            for stage, instructions in enumerate(lists)
            if devices[stage] == device
            for tick, instruction in zip(ticks[stage], instructions)
        ]
        steps.sort(key=lambda step: step[:2])  # stable: a stage's own order stays
        merged.append(tuple((stage, instruction) for _, stage, instruction in steps))
    return tuple(merged)


def _ticks(lists: Lists) -> list[list[int]]:
    """By stage, the tick of each of its instructions; -1 for a send before the first computation.

    The tick is the time at which the instruction would run if every stage had its own device, and a
    forward or a backward took one unit of time.
    """
    clock = [0] * len(lists)
    arrivals: dict[tuple[int, int], deque[int]] = {}
    computed: list[deque[int]] = [deque() for _ in lists]
    for stage, instruction in execute(lists):
        if instruction.kind.is_send:
            link = (stage, instruction.peer(stage, len(lists)))
            arrivals.setdefault(link, deque()).append(clock[stage])
        elif instruction.kind.is_receive:
            link = (instruction.peer(stage, len(lists)), stage)
            clock[stage] = max(clock[stage], arrivals[link].popleft())
        elif instruction.kind.computes:
            computed[stage].append(clock[stage])
            clock[stage] += 1
    return [_spread(*each, end=max(clock)) for each in zip(lists, computed)]


def _spread(instructions: Sequence[Instruction], computed: deque[int], end: int) -> list[int]:
    """Give all instructions of a stage a tick, from the ticks of its computations.

    A send gets the tick of the computation before it (-1: there is none), any other instruction
    that of the next computation.

    Args:
        instructions: The stage's list.
        computed: Ticks of its computations, in order.
        end: Tick of instructions after the last computation.
    """
    ticks, last = [], -1
    for instruction in instructions:
        if instruction.kind.computes:
            last = computed.popleft()
        ticks.append(last)
    following = end
    for index, instruction in reversed([*enumerate(instructions)]):
        if instruction.kind.computes:
            following = ticks[index]
        elif not instruction.kind.is_send:
            ticks[index] = following
    return ticks
