"""What every schedule must obey, and its drawing."""

from collections import deque
from collections.abc import Sequence

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules import INSIDE, Instruction, InstructionKind, Schedule
from lightning_hybrid.schedules.instructions import Lists, execute


def check(schedule: Schedule) -> None:
    """Check that the lists can be run and do the work, all of it, once.

    Raises:
        PlanError: a pass has another number of lists than there are stages, a stage does not run
            each micro-batch exactly once forward and once backward, or see `execute`.
    """
    inside = schedule.name == INSIDE  # its backwards are in the forward lists
    backwards = schedule.forward if inside else schedule.backward
    passes = ((InstructionKind.FORWARD, schedule.forward), (InstructionKind.BACKWARD, backwards))
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
            if kind is InstructionKind.BACKWARD:
                _check_weights(schedule, stage, instructions)
        for _ in execute(lists):
            pass


def _check_weights(schedule: Schedule, stage: int, instructions: Sequence[Instruction]) -> None:
    """A stage has a weight part after each of its backwards, or none at all."""
    weights = [i.microbatch for i in instructions if i.kind is InstructionKind.WEIGHT]
    if weights and sorted(weights) != list(range(schedule.microbatches)):
        raise PlanError(
            f"stage {stage} of schedule {schedule.name!r} runs weight on micro-batches "
            f"{sorted(weights)}, not once on each of 0..{schedule.microbatches - 1}"
        )
    for microbatch in weights:
        weight, backward = (
            Instruction(k, microbatch) for k in (InstructionKind.WEIGHT, InstructionKind.BACKWARD)
        )
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
            weight = instruction.kind is InstructionKind.WEIGHT
            cells[stage][clock[stage]] = "w" if weight else str(instruction.microbatch)
            clock[stage] += 1
    return [
        " ".join(f"{row.get(tick, '.'):>{width}}" for tick in range(max(clock))) for row in cells
    ]
