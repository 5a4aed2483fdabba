"""What every schedule must obey, and its drawing."""

from collections import deque
from collections.abc import Iterator, Sequence

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import Copy, Kind, together
from lightning_hybrid.schedules.dealt import DealtLists, DealtSchedule
from lightning_hybrid.schedules.instructions import (
    Instruction,
    Lists,
    Schedule,
    Step,
    exchange,
    execute,
)


def check(schedule: Schedule) -> None:
    """Check that the lists can be run and do the work, all of it, once.

    Raises:
        PlanError: a pass has another number of lists than there are stages, a stage does not run
            each micro-batch exactly once forward and once backward, or see `execute`.
    """
    passes = ((Kind.FORWARD, schedule.forward), (Kind.BACKWARD, schedule.backward))
    for kind, lists in passes:
        if len(lists) != schedule.stages:
            raise PlanError(
                f"schedule {schedule.name!r} has {len(lists)} {kind} lists "
                f"for stages({schedule.stages})"
            )
        for stage, instructions in enumerate(lists):
            done = sorted(i.microbatch for i in instructions if i.kind is kind)
            if done != list(range(schedule.microbatches)):
                raise PlanError(
                    f"stage {stage} of schedule {schedule.name!r} runs {kind} on micro-batches "
                    f"{done}, not once on each of 0..{schedule.microbatches - 1}"
                )
            if kind is Kind.BACKWARD:
                _check_weights(schedule, stage, instructions)
        for _ in execute(lists):
            pass


def _check_weights(schedule: Schedule, stage: int, instructions: Sequence[Instruction]) -> None:
    """A stage has a weight part after each of its backwards, or none at all."""
    weights = [i.microbatch for i in instructions if i.kind is Kind.WEIGHT]
    if weights and sorted(weights) != list(range(schedule.microbatches)):
        raise PlanError(
            f"stage {stage} of schedule {schedule.name!r} runs weight on micro-batches "
            f"{sorted(weights)}, not once on each of 0..{schedule.microbatches - 1}"
        )
    for microbatch in weights:
        weight, backward = (Instruction(k, microbatch) for k in (Kind.WEIGHT, Kind.BACKWARD))
        if instructions.index(weight) < instructions.index(backward):
            raise PlanError(
                f"stage {stage} of schedule {schedule.name!r} runs {weight} before {backward}, "
                "which it is the rest of"
            )


def draw(schedule: Schedule) -> str:
    """Draw the schedule: one row per stage, one column per clock, micro-batches as entries.

    A forward or a backward takes one clock, a message none. Left of the bar is the forward pass,
    right of it the backward pass; dots are the bubble::

        stage 0   0 1 2 . | . 2 1 0
        stage 1   . 0 1 2 | 2 1 0 .

    Where a backward is split, each part takes a clock, and its weight part is a ``w``.
    """
    width = len(str(schedule.microbatches - 1))
    halves = [_clock_table(lists, width) for lists in (schedule.forward, schedule.backward)]
    margin = len(f"stage {schedule.stages - 1}")
    return "\n".join(
        f"{f'stage {stage}':<{margin}}   {' | '.join(rows)}"
        for stage, rows in enumerate(zip(*halves))
    )


def _clock_table(lists: Lists, width: int) -> list[str]:
    clock = [0] * len(lists)
    sent: dict[tuple[int, int], deque[int]] = {}
    cells: list[dict[int, str]] = [{} for _ in lists]
    for stage, instruction in execute(lists):
        if instruction.kind.is_send:
            link = (stage, instruction.peer(stage, len(lists)))
            sent.setdefault(link, deque()).append(clock[stage])
        elif instruction.kind.is_receive:
            link = (instruction.peer(stage, len(lists)), stage)
            clock[stage] = max(clock[stage], sent[link].popleft())
        elif instruction.kind.computes:
            weight = instruction.kind is Kind.WEIGHT
            cells[stage][clock[stage]] = "w" if weight else str(instruction.microbatch)
            clock[stage] += 1
    return [
        " ".join(f"{row.get(tick, '.'):>{width}}" for tick in range(max(clock))) for row in cells
    ]


def execute_merged(lists: Sequence[Sequence[Step]]) -> Iterator[Step]:
    """As `execute`, for one list per device with the instructions of one stage or several."""
    stages = 1 + max((stage for steps in lists for stage, _ in steps), default=0)
    yield from exchange(lists, lambda stage, step: step.peer(stage, stages), "stage {}".format)


def execute_dealt(
    dealt: DealtSchedule, lists: DealtLists, *, collects: bool = False
) -> Iterator[tuple[Copy, Instruction]]:
    """As `execute`, for the lists of one pass of a schedule whose stages have copies.

    Args:
        dealt: The schedule.
        lists: Its `forward` or `backward`.
        collects: Whether the last stage and the last copy of the one before are on one device.
    """
    places = [Copy(s, n) for s, copies in enumerate(lists) for n in range(len(copies))]
    devices = [*([place] for place in places[:-2]), places[-2:]] if collects else None
    yield from exchange(
        [together(lists, at) for at in devices or ([place] for place in places)],
        lambda place, step: peer_of(dealt, place, step),
        str,
    )


def peer_of(dealt: DealtSchedule, place: Copy, step: Instruction) -> Copy:
    """The copy at the other end of a send or receive."""
    stage = step.peer(place.stage, len(dealt.copies))
    return Copy(stage, step.microbatch % dealt.copies[stage])


def collected(copies: Sequence[int]) -> tuple[int, ...]:
    """Add the stage that collects outputs to the numbers of copies, if the last stage has several.

    It has no layers, and is on the device of the last of those copies, the driver.
    """
    return (*copies, 1) if copies[-1] > 1 else tuple(copies)
