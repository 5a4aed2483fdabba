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
    """One copy of a stage, on a device of its own.

    Attributes:
        stage: number of the stage.
        number: number of the copy among the copies of this stage, from 0.
    """

    stage: int
    number: int

    def __str__(self) -> str:
        return f"stage {self.stage}, copy {self.number}"


DealtLists = tuple[tuple[tuple[Instruction, ...], ...], ...]
"""The instruction list of each copy: first by the number of the stage, then by that of the copy."""

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
    """The instruction lists of a replica for one call of a network whose stages may have copies.

    `deal` makes it.

    Attributes:
        copies: by stage, its number of copies.
        microbatches: number of micro-batches of the call, all copies together.
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
            collects: Whether the last stage has no layers and only collects outputs (see
                `collected`): then it shares a device with the last copy of the stage before it.
                Every other copy has a device of its own.

        Yields:
            `(copy, instruction)` in one of the orders in which they may run.

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
        """Find the copy at the other end of a message: the one that computes its micro-batch.

        Args:
            place: The copy of a stage that executes `step`.
            step: A send or a receive.
        """
        stage = step.peer(place.stage, len(self.copies))
        return StageCopy(stage, step.microbatch % self.copies[stage])


def together(lists: DealtLists, places: Sequence[StageCopy]) -> list[tuple[StageCopy, Instruction]]:
    """Merge the instruction lists of one device, where stages have copies.

    If the stage that collects outputs is on the device too, its sends to other devices and its
    REDUCE come first, then all instructions of the copy, then what waits for other devices.

    Args:
        lists: `DealtSchedule.forward` or `DealtSchedule.backward`.
        places: What is on the device: one copy; or first a copy of the last stage with layers, and
            second the stage that collects the outputs of such copies.

    Returns:
        The device's instructions in order, as `(copy, instruction)`.
    """
    own, *collects = ([(at, step) for step in lists[at.stage][at.number]] for at in places)
    before = [each for steps in collects for each in steps if each[1].kind in _BEFORE]
    after = [each for steps in collects for each in steps if each[1].kind not in _BEFORE]
    return [*before, *own, *after]


def collected(copies: Sequence[int]) -> tuple[int, ...]:
    """Add a stage that collects the network's outputs, if the last stage has several copies.

    The added stage has no layers. Its only copy is on the driver, as is the last copy of the stage
    before it.

    Args:
        copies: By stage, its number of copies.

    Returns:
        The numbers of `copies`, and then a 1 if a stage is added.
    """
    return (*copies, 1) if copies[-1] > 1 else tuple(copies)


def deal(schedule: Schedule, copies: Sequence[int]) -> DealtSchedule:
    """Deal the micro-batches of a schedule to the copies of its stages, in turn.

    Of r copies of a stage, copy m mod r gets micro-batch m. Each copy keeps the instructions of its
    micro-batches, in their order. The REDUCE of a copy stands before the last computation of its
    backward; a copy without a micro-batch has a REDUCE alone, since the other copies of the stage
    wait for it. If each stage has one copy, the lists are those of the schedule.

    Args:
        schedule: Any schedule if each stage has one copy, else one of `DEALS`.
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

    Args:
        lists: By stage, its instructions of the forward or of the backward pass.
        copies: By stage, its number of copies.
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
        own: the instructions of the copy's micro-batches, in order.

    Returns:
        The instructions of the copy; of one that computes nothing, a REDUCE alone.
    """
    if all(step.kind is not InstructionKind.REDUCE for step in of_stage):
        return tuple(own)
    own = [step for step in own if step.kind is not InstructionKind.REDUCE]
    computed = [i for i, step in enumerate(own) if step.kind.computes]
    if not computed:
        return (*own, Instruction(InstructionKind.REDUCE, 0))
    at = computed[-1]
    return (*own[:at], Instruction(InstructionKind.REDUCE, own[at].microbatch), *own[at:])
