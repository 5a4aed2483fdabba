"""Copies of a stage: the micro-batches of a replica are dealt to them in turn.

Stage s has r_s copies, each on a device of its own; micro-batch m is computed there, forwards and
backwards, by copy m mod r_s. With copies (2, 1) and five micro-batches fill-drain looks like this::

    stage 0, copy 0   0 2 4 . . . | . 4 . 2 . 0
    stage 0, copy 1   1 3 . . . . | . . 3 . 1 .
    stage 1           . 0 1 2 3 4 | 4 3 2 1 0 .

The driver is copy 0 of the last stage. Its other copies are workers: they send it the network's
outputs, and get the gradients of these back before the driver computes its own.

Both ends of a link know the order of its messages: the micro-batches that the two have in common,
rising in the forward pass and falling in the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.instructions import Instruction, Kind, Schedule, exchange

DEALS = ("gpipe", "zero_bubble")
"""The schedules whose stages may have copies."""


class Copy(NamedTuple):
    """One copy of a stage, which is one rank of a replica."""

    stage: int
    number: int

    def __str__(self) -> str:
        return f"stage {self.stage}, copy {self.number}"


DealtLists = tuple[tuple[tuple[Instruction, ...], ...], ...]
"""By stage and copy the instruction list."""


@dataclass(frozen=True)
class DealtSchedule:
    """What every rank of a replica does in one call of the network whose stages have copies.

    Attributes:
        copies: by stage, how many copies it has.
        microbatches: number of slices of a batch.
        forward: by stage and copy, what it does in the forward pass.
        backward: likewise, in the backward pass.
    """

    copies: tuple[int, ...]
    microbatches: int
    forward: DealtLists
    backward: DealtLists

    def execute(self, lists: DealtLists) -> Iterator[tuple[Copy, Instruction]]:
        """Run `forward` or `backward` side by side, as `instructions.execute` does.

        Raises:
            PlanError: see there.
        """
        named = [
            [(Copy(stage, number), step) for step in steps]
            for stage, copies in enumerate(lists)
            for number, steps in enumerate(copies)
        ]
        yield from exchange(named, lambda place, step: peer(place, step, self.copies), str)


def peer(place: Copy, step: Instruction, copies: Sequence[int]) -> Copy:
    """The copy at the other end of a send or receive."""
    # The driver, which closes the ring, is copy 0, whoever has the micro-batch in the last stage.
    if step.kind in (Kind.SEND_OUTPUT, Kind.RECEIVE_OUTPUT_GRADIENT) or (
        place.stage == 0 and step.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
    ):
        return Copy(len(copies) - 1, 0)
    stage = step.peer(place.stage, len(copies))
    return Copy(stage, step.microbatch % copies[stage])


def deal(schedule: Schedule, copies: Sequence[int]) -> DealtSchedule:
    """Deal the micro-batches of a schedule to the copies of its stages.

    Each copy keeps the instructions of its micro-batches, in their order. The reduction stands
    before the last computation of the copy's own backward; a copy without a micro-batch has a
    reduction alone, for which the other owners of the stage wait. Where each stage has one copy,
    the lists are those of the schedule.

    Args:
        schedule: Fill-drain, with split backwards or without.
        copies: How many copies each stage has.

    Raises:
        PlanError: the schedule cannot be dealt, or `copies` is not one number of at least 1 for
            each stage, or gives several to a stage that is alone.
    """
    counts = tuple(copies)
    check_copies(counts, schedule.stages, schedule.name)
    return DealtSchedule(
        copies=counts,
        microbatches=schedule.microbatches,
        forward=_dealt(schedule.forward, counts, _forward_of_last),
        backward=_dealt(schedule.backward, counts, _backward_of_last),
    )


def check_copies(copies: Sequence[int], stages: int, schedule: str) -> None:
    """Refuse copies that stages cannot have.

    Raises:
        PlanError: see `deal`.
    """
    if len(copies) != stages or any(not isinstance(r, int) or r < 1 for r in copies):
        raise PlanError(
            f"copies{tuple(copies)} must be one number of at least 1 for each of stages({stages})"
        )
    if max(copies) == 1:
        return
    if schedule not in DEALS:
        raise PlanError(
            f"copies{tuple(copies)} of stages need schedule {' or '.join(map(repr, DEALS))}, "
            f"not {schedule!r}"
        )
    if stages == 1:
        raise PlanError(
            f"copies{tuple(copies)} of a stage that is alone are replicas: ask for them"
        )


def _dealt(
    lists: Sequence[Sequence[Instruction]],
    copies: tuple[int, ...],
    of_last: Callable[[Sequence[Instruction], int, int], Iterator[Instruction]],
) -> DealtLists:
    last = len(lists) - 1

    def one(stage: int, number: int) -> tuple[Instruction, ...]:
        count, steps = copies[stage], lists[stage]
        if count == 1:
            return tuple(steps)
        if stage == last:
            return _reduced(steps, [*of_last(steps, number, count)])
        return _reduced(steps, [s for s in steps if s.microbatch % count == number])

    return tuple(
        tuple(one(stage, number) for number in range(count)) for stage, count in enumerate(copies)
    )


_FEEDS = (Kind.SEND_INPUT, Kind.RECEIVE_INPUT_GRADIENT)  # the driver's, for all micro-batches


def _forward_of_last(
    steps: Sequence[Instruction], number: int, count: int
) -> Iterator[Instruction]:
    for step in steps:
        if step.kind in _FEEDS:
            if number == 0:
                yield step
        elif step.microbatch % count == number:
            yield step
            if step.kind is Kind.FORWARD and number > 0:
                yield Instruction(Kind.SEND_OUTPUT, step.microbatch)
    if number == 0:  # the others compute while the driver does
        microbatches = [s.microbatch for s in steps if s.kind is Kind.FORWARD]
        yield from (Instruction(Kind.RECEIVE_OUTPUT, m) for m in microbatches if m % count)


def _backward_of_last(
    steps: Sequence[Instruction], number: int, count: int
) -> Iterator[Instruction]:
    if number == 0:  # else the others wait for what the driver computes
        microbatches = [s.microbatch for s in steps if s.kind is Kind.BACKWARD]
        yield from (Instruction(Kind.SEND_OUTPUT_GRADIENT, m) for m in microbatches if m % count)
    for step in steps:
        if step.kind in _FEEDS:
            if number == 0:
                yield step
        elif step.microbatch % count == number:
            if step.kind is Kind.BACKWARD and number > 0:
                yield Instruction(Kind.RECEIVE_OUTPUT_GRADIENT, step.microbatch)
            yield step


def _reduced(of_stage: Sequence[Instruction], own: list[Instruction]) -> tuple[Instruction, ...]:
    """Put the reduction before the last computation of a copy's own backward."""
    if all(step.kind is not Kind.REDUCE for step in of_stage):
        return tuple(own)
    own = [step for step in own if step.kind is not Kind.REDUCE]
    computed = [i for i, step in enumerate(own) if step.kind.computes]
    if not computed:
        return (*own, Instruction(Kind.REDUCE, 0))
    at = computed[-1]
    return (*own[:at], Instruction(Kind.REDUCE, own[at].microbatch), *own[at:])
