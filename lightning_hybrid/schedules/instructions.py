"""What a rank does, in order: instructions, the lists they form, and the rules they obey.

The stages form a ring. Activations travel to the next stage, gradients to the previous one, and
the driver, which owns the last stage, closes the ring: it feeds the inputs to stage 0 and takes
the gradient of the inputs from it. ::

    inputs                 activations                    activations
    driver ──────> stage 0 ───────────> stage 1 ── ... ──────────────> last stage (driver)
           <──────         <───────────         <─ ... ──────────────
    gradients of the inputs      gradients                  gradients

A message between two stages therefore always goes one step along the ring or one step against it,
and the two directions of an edge are two links. A link delivers in the order of sending. Sends
never block; receives block until the message is there.

The lists are plain data with three readers: the runtime executes them, the simulator times them
and the report draws them.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from lightning_hybrid.errors import PlanError


class Kind(StrEnum):
    """The steps a rank knows."""

    SEND_INPUT = "send_input"
    """Driver: send a micro-batch of the network's inputs to stage 0."""
    RECEIVE_ACTIVATION = "receive_activation"
    """Take the values that the previous stage (for stage 0: the driver) sent."""
    FORWARD = "forward"
    """Run the stage on the micro-batch and keep what its backward needs."""
    SEND_ACTIVATION = "send_activation"
    """Send the values that cross the cut to the next stage."""
    RECEIVE_GRADIENT = "receive_gradient"
    """Take the gradient of what this stage sent forward."""
    BACKWARD = "backward"
    """Back-propagate the micro-batch through the stage; parameter gradients accumulate.

    Where the stage has WEIGHT instructions: for the gradients of its inputs alone."""
    WEIGHT = "weight"
    """Add the parameter gradients that BACKWARD has put off."""
    SEND_GRADIENT = "send_gradient"
    """Send the gradient of what this stage received to where it came from."""
    REDUCE = "reduce"
    """Average the gradients over the replicas of the stage, overlapped with the next instruction.

    It stands right before the last BACKWARD (or WEIGHT) and carries its micro-batch: from here on
    a gradient is final as soon as that one has added to it, and may travel while the rest is
    computed.
    """
    RECEIVE_INPUT_GRADIENT = "receive_input_gradient"
    """Driver: take the gradient of the network's inputs from stage 0."""

    @property
    def computes(self) -> bool:
        """Whether it keeps the device busy."""
        return self in _COMPUTES

    @property
    def is_send(self) -> bool:
        return self in _SENDS

    @property
    def is_receive(self) -> bool:
        return self in _TAKES


_COMPUTES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT})
# By the kind of a receive, the kinds of send that it takes.
_TAKES = {
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_INPUT, Kind.SEND_ACTIVATION),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT,),
    Kind.RECEIVE_INPUT_GRADIENT: (Kind.SEND_GRADIENT,),
}
_SENDS = frozenset(kind for kinds in _TAKES.values() for kind in kinds)

# Where the other end of a message is: one step along (+1) or against (-1) the ring.
_STEP_TO_PEER = {
    Kind.SEND_INPUT: +1,
    Kind.SEND_ACTIVATION: +1,
    Kind.RECEIVE_ACTIVATION: -1,
    Kind.SEND_GRADIENT: -1,
    Kind.RECEIVE_GRADIENT: +1,
    Kind.RECEIVE_INPUT_GRADIENT: +1,
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of one rank on one micro-batch.

    Attributes:
        kind: what is done.
        microbatch: number of the micro-batch.
    """

    kind: Kind
    microbatch: int

    def peer(self, stage: int, stages: int) -> int:
        """The stage at the other end of this send or receive of `stage`."""
        return (stage + _STEP_TO_PEER[self.kind]) % stages

    def __str__(self) -> str:
        return f"{self.kind}({self.microbatch})"


Lists = tuple[tuple[Instruction, ...], ...]
"""One instruction list per stage; the index is the stage, the last one is the driver's."""

P = TypeVar("P", bound=Hashable)

Step = tuple[int, Instruction]
"""An instruction of the stage with this number, in the list of a device with several stages."""


@dataclass(frozen=True)
class Schedule:
    """What every rank of a replica does in one call of the network.

    Forward and backward are two lists, because between them the driver runs the user's code: the
    rest of `training_step` and the start of `loss.backward()`.

    Attributes:
        name: of the schedule, such as `gpipe`.
        stages: number of stages.
        microbatches: number of slices of a batch.
        forward: by stage, what it does in the forward pass.
        backward: by stage, what it does in the backward pass.
    """

    name: str
    stages: int
    microbatches: int
    forward: Lists
    backward: Lists


def execute(lists: Sequence[Sequence[Instruction]]) -> Iterator[Step]:
    """Run the lists of all stages side by side; yield `(stage, instruction)` in a possible order.

    Sends don't block, receives wait for their message. Which of the possible orders comes out does
    not matter to a reader that keeps one clock per stage and one per link.

    Raises:
        PlanError: a stage receives another message than the one that comes next on the link, all
            stages wait (deadlock), or messages are left over at the end.
    """
    yield from execute_merged([[(k, step) for step in steps] for k, steps in enumerate(lists)])


def execute_merged(lists: Sequence[Sequence[Step]]) -> Iterator[Step]:
    """The same for one list per device, each with the instructions of one stage or more.

    Raises:
        PlanError: see `execute`.
    """
    stages = 1 + max((stage for steps in lists for stage, _ in steps), default=0)
    yield from exchange(lists, lambda stage, step: step.peer(stage, stages), "stage {}".format)


def exchange(
    lists: Iterable[Iterable[tuple[P, Instruction]]],
    peer: Callable[[P, Instruction], P],
    shown: Callable[[P], str],
) -> Iterator[tuple[P, Instruction]]:
    """The same for places of any sort, with one queue from each place to each other.

    Args:
        lists: By device, instructions and the place that each is of.
        peer: From a place and a send or receive of it to the place at the other end.
        shown: How to name a place in an error.

    Raises:
        PlanError: see `execute`.
    """
    todo = [deque(steps) for steps in lists]
    links: dict[tuple[P, P], deque[Instruction]] = {}
    progress = True
    while progress:
        progress = False
        for steps in todo:
            while steps:  # as far as this list comes before it must wait
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
    # Along the ring run inputs and activations, against it gradients: on a ring of two stages
    # both run on the same edge, and only the kinds tell them apart.
    if sent.microbatch != received.microbatch or sent.kind not in _TAKES[received.kind]:
        raise PlanError(
            f"{target} expects {received}, but the next message from {source} is "
            f"{sent}: sends and receives of a link must be in the same order"
        )
