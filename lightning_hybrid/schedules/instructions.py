"""Instructions of a rank, the lists that make a schedule of them, and a check by simulation.

The stages form a ring. Activations travel to the next stage, gradients to the previous one, and the
driver, which owns the last stage, closes the ring: it sends the inputs to stage 0 and receives the
gradient of the inputs from it. ::

    inputs                 activations                    activations
    driver ──────> stage 0 ───────────> stage 1 ── ... ──────────────> last stage (driver)
           <──────         <───────────         <─ ... ──────────────
    gradients of the inputs      gradients                  gradients

A message between two stages therefore always goes one step along the ring or one step against it,
and the two directions of an edge are two links. A link delivers in the order of sending. In a
schedule sends do not block, and receives block until the message has arrived. On a device sends may
block too: before they are run, `lightning_hybrid.schedules.one_order` orders the instructions so
that no deadlock is possible.

The lists are plain data: the runtime executes them, the simulator times them and the report draws
them.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from lightning_hybrid.errors import PlanError


class InstructionKind(StrEnum):
    """The kinds of instructions."""

    SEND_INPUT = "send_input"
    """Driver: send a micro-batch of the network's inputs to stage 0."""
    RECEIVE_ACTIVATION = "receive_activation"
    """Receive the activations of the previous stage (stage 0: the driver's inputs)."""
    FORWARD = "forward"
    """Run the stage on the micro-batch, and keep what its backward needs."""
    SEND_ACTIVATION = "send_activation"
    """Send the activations that cross the cut to the next stage."""
    RECEIVE_GRADIENT = "receive_gradient"
    """Receive the gradients of the activations that this stage has sent to the next one."""
    BACKWARD = "backward"
    """Back-propagate the micro-batch through the stage; parameter gradients accumulate.

    If the stage has WEIGHT instructions, BACKWARD computes the gradients of its inputs alone."""
    WEIGHT = "weight"
    """Compute and add the parameter gradients that BACKWARD has left out."""
    SEND_GRADIENT = "send_gradient"
    """Send the gradients of the stage's inputs to where the inputs came from: the previous stage,
    or the driver."""
    REDUCE = "reduce"
    """Average the gradients over the replicas of the stage, overlapped with the next instruction.

    REDUCE stands right before the last BACKWARD (or WEIGHT) and has its micro-batch: as soon as
    this last one has added to the gradient of a parameter, that gradient is final, and is averaged
    while the gradients of other parameters are computed."""
    RECEIVE_INPUT_GRADIENT = "receive_input_gradient"
    """Driver: receive the gradient of the network's inputs from stage 0."""
    EXPECT_ACTIVATION = "expect_activation"
    """Begin the receive that a later RECEIVE_ACTIVATION waits for; see `in_one_order`."""
    EXPECT_GRADIENT = "expect_gradient"
    """Begin the receive that a later RECEIVE_GRADIENT or RECEIVE_INPUT_GRADIENT waits for."""

    @property
    def computes(self) -> bool:
        """Whether the instruction keeps the device busy: FORWARD, BACKWARD and WEIGHT do."""
        return self in _COMPUTES

    @property
    def is_send(self) -> bool:
        return self in _SENDS

    @property
    def is_receive(self) -> bool:
        return self in _TAKES


BACKWARD_KINDS = frozenset(
    {
        InstructionKind.EXPECT_GRADIENT,
        InstructionKind.RECEIVE_GRADIENT,
        InstructionKind.BACKWARD,
        InstructionKind.WEIGHT,
        InstructionKind.SEND_GRADIENT,
        InstructionKind.REDUCE,
    }
)
"""The kinds of instructions that belong to a backward pass where they stand in a forward list, as
they do under `1f1b`."""
_COMPUTES = frozenset({InstructionKind.FORWARD, InstructionKind.BACKWARD, InstructionKind.WEIGHT})
# For each kind of receive, the kinds of send that it may receive.
_TAKES = {
    InstructionKind.RECEIVE_ACTIVATION: (
        InstructionKind.SEND_INPUT,
        InstructionKind.SEND_ACTIVATION,
    ),
    InstructionKind.RECEIVE_GRADIENT: (InstructionKind.SEND_GRADIENT,),
    InstructionKind.RECEIVE_INPUT_GRADIENT: (InstructionKind.SEND_GRADIENT,),
}
_SENDS = frozenset(kind for kinds in _TAKES.values() for kind in kinds)

# Offset of the stage at the other end of a message: +1 along the ring, -1 against it.
_STEP_TO_PEER = {
    InstructionKind.SEND_INPUT: +1,
    InstructionKind.SEND_ACTIVATION: +1,
    InstructionKind.RECEIVE_ACTIVATION: -1,
    InstructionKind.SEND_GRADIENT: -1,
    InstructionKind.RECEIVE_GRADIENT: +1,
    InstructionKind.RECEIVE_INPUT_GRADIENT: +1,
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one rank on one micro-batch.

    Attributes:
        kind: what the rank does.
        microbatch: number of the micro-batch.
    """

    kind: InstructionKind
    microbatch: int

    def peer(self, stage: int, stages: int) -> int:
        """The number of the stage at the other end of this message; for sends and receives alone.

        Args:
            stage: number of the stage that executes the instruction.
            stages: number of all stages.
        """
        return (stage + _STEP_TO_PEER[self.kind]) % stages

    def __str__(self) -> str:
        return f"{self.kind}({self.microbatch})"


Lists = tuple[tuple[Instruction, ...], ...]
"""The instruction list of each stage; the last one is the driver's."""

P = TypeVar("P", bound=Hashable)

PlacedInstruction = tuple[int, Instruction]
"""A stage's number and an instruction of that stage: the entries of a device's list."""


@dataclass(frozen=True)
class Schedule:
    """The instruction lists of the stages of a replica for one call of the network.

    Forward and backward are two lists, because between them the driver runs the user's code: the
    rest of `training_step` and the start of `loss.backward()`. Under `1f1b` the forward list has
    the backwards too, and the backward list is empty.

    Attributes:
        name: name of the schedule, such as `gpipe`.
        stages: number of stages.
        microbatches: number of micro-batches.
        forward: by stage, the instructions of the forward pass.
        backward: by stage, the instructions of the backward pass.
    """

    name: str
    stages: int
    microbatches: int
    forward: Lists
    backward: Lists


def execute(lists: Sequence[Sequence[Instruction]]) -> Iterator[PlacedInstruction]:
    """Simulate the lists of all stages running at the same time, each on a device of its own.

    Sends do not block, receives wait for their message. Nothing is computed.

    Args:
        lists: By stage, its instructions.

    Yields:
        `(number of the stage, instruction)` in one of the orders in which they may run. Which order
        it is does not matter to a caller that keeps a clock per stage and per link.

    Raises:
        PlanError: a stage expects another message than the next one on the link, all stages wait
            (deadlock), or messages are never received.
    """
    yield from execute_merged([[(k, step) for step in steps] for k, steps in enumerate(lists)])


def execute_merged(lists: Sequence[Sequence[PlacedInstruction]]) -> Iterator[PlacedInstruction]:
    """Simulate devices running at the same time; each device may have several stages.

    Sends do not block, receives wait for their message. Nothing is computed.

    Args:
        lists: By device, its instructions, each with the number of its stage.

    Yields:
        `(number of the stage, instruction)` in one of the orders in which they may run.

    Raises:
        PlanError: a stage expects another message than the next one on the link, all devices wait
            (deadlock), or messages are never received.
    """
    stages = 1 + max((stage for steps in lists for stage, _ in steps), default=0)
    yield from exchange(lists, lambda stage, step: step.peer(stage, stages), "stage {}".format)


def exchange(
    lists: Iterable[Iterable[tuple[P, Instruction]]],
    peer: Callable[[P, Instruction], P],
    shown: Callable[[P], str],
) -> Iterator[tuple[P, Instruction]]:
    """Simulate devices running at the same time; their instructions belong to places of any type.

    A place is a stage (its number), or a copy of a stage (`StageCopy`). There is one queue of
    messages from each place to each other one. Sends do not block, receives wait for their message.
    Nothing is computed.

    Args:
        lists: By device, its instructions, each with the place that it belongs to.
        peer: Function from a place and its send or receive to the place at the other end.
        shown: Function from a place to its name in an error, such as "stage 1".

    Yields:
        `(place, instruction)` in one of the orders in which they may run.

    Raises:
        PlanError: a place expects another message than the next one on the link, all devices wait
            (deadlock), or messages are never received.
    """
    todo = [deque(steps) for steps in lists]
    links: dict[tuple[P, P], deque[Instruction]] = {}
    progress = True
    while progress:
        progress = False
        for steps in todo:
            while steps:  # run this list until it must wait for a message
                place, step = steps[0]
                if step.kind.is_send:
                    links.setdefault((place, peer(place, step)), deque()).append(step)
                elif step.kind.is_receive:
                    source = peer(place, step)
                    if not (waiting := links.get((source, place))):
                        break
                    _deliver(waiting.popleft(), step, shown(source), shown(place))
                yield steps.popleft()
                progress = True
    left = [f"{shown(place)} at {step}" for (place, step), *_ in filter(None, todo)]
    if left:
        raise PlanError(f"deadlock: nobody sends what is waited for ({', '.join(left)})")
    for (source, target), messages in links.items():
        if messages:
            never = ", ".join(map(str, messages))
            raise PlanError(f"{shown(target)} never receives {never} of {shown(source)}")


def _deliver(sent: Instruction, received: Instruction, source: str, target: str) -> None:
    # On a ring of two stages activations (along the ring) and gradients (against it) share an
    # edge, and only the kinds tell them apart.
    if sent.microbatch != received.microbatch or sent.kind not in _TAKES[received.kind]:
        raise PlanError(
            f"{target} expects {received}, but the next message from {source} is "
            f"{sent}: sends and receives of a link must be in the same order"
        )
