"""Schedules whose stages have copies: the micro-batches of a replica go to the copies in turn.

Stage s has r_s copies, each on another device; copy m mod r_s computes micro-batch m, forward and
backward. With copies (2, 1) and five micro-batches fill-drain looks like this::

    stage 0, copy 0   0 2 4 . . . | . 4 . 2 . 0
    stage 0, copy 1   1 3 . . . . | . . 3 . 1 .
    stage 1           . 0 1 2 3 4 | 4 3 2 1 0 .

The last stage, which gives the driver the network's outputs, has one copy. If the last layers are
to have several copies, a stage without layers is added behind them, which collects their outputs.
The driver then has two stages: the added one, and the last of these copies.

Both ends of a link know the order of its messages: the micro-batches that both compute, rising in
the forward pass and falling in the backward pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.instructions import Instruction, InstructionKind, Schedule, exchange

DEALS = ("gpipe", "zero_bubble")
"""Names of the schedules whose stages may have copies."""


class StageCopy(NamedTuple):
    """One copy of a stage: the number of the stage, and the number of the copy among its copies."""

    stage: int
    number: int

    def __str__(self) -> str:
        return f"stage {self.stage}, copy {self.number}"


DealtLists = tuple[tuple[tuple[Instruction, ...], ...], ...]
"""By stage and copy, the list of instructions of the copy."""

# Kinds of instructions of the stage that collects outputs. On its device these kinds come before
# the instructions of the copy, since other ranks wait for them; all others come after, since they
# wait for other ranks.
_BEFORE = frozenset(
    {
        InstructionKind.SEND_INPUT,
        InstructionKind.BACKWARD,
        InstructionKind.SEND_GRADIENT,
        InstructionKind.REDUCE,
    }
)


@dataclass(frozen=True)
class DealtSchedule:
    """The instruction lists of a replica for one call of a network whose stages have copies.

    Attributes:
        copies: by stage, its number of copies.
        microbatches: number of micro-batches.
        forward: by stage and copy, the instructions of the forward pass.
        backward: by stage and copy, the instructions of the backward pass.
    """

    copies: tuple[int, ...]
    microbatches: int
    forward: DealtLists
    backward: DealtLists

    def execute(
        self, lists: DealtLists, *, collects: bool = False
    ) -> Iterator[tuple[StageCopy, Instruction]]:
        """Simulate `forward` or `backward` on all devices at the same time.

        Sends do not block, receives wait for their message. Nothing is computed.

        Args:
            lists: `forward` or `backward`.
            collects: Whether the last stage only collects outputs: then it shares a device with the
                last copy of the stage before it.

        Yields:
            Copies and their instructions, in an order in which they may be run.

        Raises:
            PlanError: a copy expects another message than the next one on the link, all copies wait
                (deadlock), or messages are never received.
        """
        places = [StageCopy(s, n) for s, copies in enumerate(lists) for n in range(len(copies))]
        devices = [*([place] for place in places[:-2]), places[-2:]] if collects else None
        yield from exchange(
            [together(lists, at) for at in devices or ([place] for place in places)], self.peer, str
        )

    def peer(self, place: StageCopy, step: Instruction) -> StageCopy:
        """Find the copy at the other end of a message.

        Args:
            place: The copy that executes `step`.
            step: A send or a receive.
        """
        stage = step.peer(place.stage, len(self.copies))
        return StageCopy(stage, step.microbatch % self.copies[stage])


def together(lists: DealtLists, places: Sequence[StageCopy]) -> list[tuple[StageCopy, Instruction]]:
    """Merge the instruction lists of one device.

    Args:
        lists: Instructions by stage and copy.
        places: What is on the device: one copy; or a copy of the last stage with layers, and then
            the stage without layers that collects the outputs of such copies.

    Returns:
        The device's instructions in order, each with the copy that it belongs to.
    """
    own, *collects = ([(at, step) for step in lists[at.stage][at.number]] for at in places)
    before = [each for steps in collects for each in steps if each[1].kind in _BEFORE]
    after = [each for steps in collects for each in steps if each[1].kind not in _BEFORE]
    return [*before, *own, *after]


def collected(copies: Sequence[int]) -> tuple[int, ...]:
    """Add a stage that collects the network's outputs, if the last stage has several copies.

    The added stage has no layers and one copy, on the device of the last copy of the stage before:
    the driver.

    Args:
        copies: By stage, its number of copies.

    Returns:
        These numbers, with a 1 for the added stage, if there is one.
    """
    return (*copies, 1) if copies[-1] > 1 else tuple(copies)


def deal(schedule: Schedule, copies: Sequence[int]) -> DealtSchedule:
    """Deal the micro-batches of a schedule to the copies of its stages, in turn.

    Each copy keeps the instructions of its micro-batches, in their order. The REDUCE of a copy
    stands before the last computation of its backward; a copy without a micro-batch has a REDUCE
    alone, since the other copies of the stage wait for it. If each stage has one copy, the lists
    are those of the schedule.

    Args:
        schedule: Fill-drain, with split backwards or without.
        copies: Number of copies of each stage; 1 for the last stage (see `collected`).

    Raises:
        PlanError: stages of this schedule cannot have copies; or `copies` is not one number of at
            least 1 for each stage; or the last or only stage has several copies.
    """
    counts = tuple(copies)
    check_copies(counts, schedule.stages, schedule.name)
    if counts[-1] > 1:
        raise PlanError(f"copies{counts}: the last stage, which has the outputs, has one copy")
    return DealtSchedule(
        copies=counts,
        microbatches=schedule.microbatches,
        forward=_dealt(schedule.forward, counts),
        backward=_dealt(schedule.backward, counts),
    )


def check_copies(copies: Sequence[int], stages: int, schedule: str) -> None:
    """Check the numbers of copies of all stages.

    Args:
        copies: By stage, its number of copies.
        stages: Number of stages.
        schedule: Name of the schedule.

    Raises:
        PlanError: `copies` is not one number of at least 1 for each stage; or a stage has several
            copies, and the schedule does not allow it or there is only one stage.
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


def _dealt(lists: Sequence[Sequence[Instruction]], copies: tuple[int, ...]) -> DealtLists:
    """Deal the instruction list of each stage to its copies; see `deal`.

    Copy i of n gets the instructions for the micro-batches whose number modulo n is i.
    """

    def one(stage: int, number: int) -> tuple[Instruction, ...]:
        count, steps = copies[stage], lists[stage]
        if count == 1:
            return tuple(steps)
        return _reduced(steps, [s for s in steps if s.microbatch % count == number])

    return tuple(
        tuple(one(stage, number) for number in range(count)) for stage, count in enumerate(copies)
    )


def _reduced(of_stage: Sequence[Instruction], own: list[Instruction]) -> tuple[Instruction, ...]:
    """Put a REDUCE before the last computation of a copy, if its stage has a REDUCE.

    Args:
        of_stage: all instructions of the stage; in the forward pass there is no REDUCE.
        own: the instructions of the copy.
    """
    if all(step.kind is not InstructionKind.REDUCE for step in of_stage):
        return tuple(own)
    own = [step for step in own if step.kind is not InstructionKind.REDUCE]
    computed = [i for i, step in enumerate(own) if step.kind.computes]
    if not computed:
        return (*own, Instruction(InstructionKind.REDUCE, 0))
    at = computed[-1]
    return (*own[:at], Instruction(InstructionKind.REDUCE, own[at].microbatch), *own[at:])
