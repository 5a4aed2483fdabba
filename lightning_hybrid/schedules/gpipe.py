"""Fill and drain (GPipe): all micro-batches forward, then all of them backward."""

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.instructions import Instruction, InstructionKind, Schedule


def gpipe(stages: int, microbatches: int, *, input_gradient: bool = False) -> Schedule:
    """Make the fill-drain schedule: all micro-batches forward, then all of them backward.

    It looks like this: one row per stage, one column per clock. A forward or a backward takes one
    clock, a message none; dots are the bubble::

        stage 0   0 1 2 3 . . | . . 3 2 1 0
        stage 1   . 0 1 2 3 . | . 3 2 1 0 .
        stage 2   . . 0 1 2 3 | 3 2 1 0 . .

    The backward pass takes the micro-batches in reverse. So does autograd in the reference
    `torch.cat([net(x_i) for x_i in x.chunk(M)])`: it walks the youngest graph first. Parameter
    gradients are thus summed in the same order, and floating-point sums come out bit for bit equal.

    Args:
        stages: Number of stages; the last one is the driver's. A single stage sends nothing.
        microbatches: Number of micro-batches.
        input_gradient: Whether the driver wants the gradient of the network's inputs.

    Raises:
        PlanError: `stages` or `microbatches` is less than one.

    Reference: Huang et al., GPipe (arXiv 1811.06965).
    """
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise PlanError(f"{name}({value}) must be at least 1")
    return Schedule(
        name="gpipe",
        stages=stages,
        microbatches=microbatches,
        forward=tuple(_forward(stage, stages, microbatches) for stage in range(stages)),
        backward=tuple(
            _backward(stage, stages, microbatches, input_gradient) for stage in range(stages)
        ),
    )


def _forward(stage: int, stages: int, microbatches: int) -> tuple[Instruction, ...]:
    driver = stage == stages - 1
    steps: list[Instruction] = []
    if driver and stages > 1:
        # All inputs are sent first: when the driver waits for activations, stage 0 must have them.
        steps += [Instruction(InstructionKind.SEND_INPUT, m) for m in range(microbatches)]
    for m in range(microbatches):
        if stages > 1:
            steps.append(Instruction(InstructionKind.RECEIVE_ACTIVATION, m))
        steps.append(Instruction(InstructionKind.FORWARD, m))
        if not driver:
            steps.append(Instruction(InstructionKind.SEND_ACTIVATION, m))
    return tuple(steps)


def _backward(
    stage: int, stages: int, microbatches: int, input_gradient: bool
) -> tuple[Instruction, ...]:
    driver = stage == stages - 1
    input_gradient = input_gradient and stages > 1  # with one stage no message is needed
    steps: list[Instruction] = []
    for m in reversed(range(microbatches)):
        if not driver:
            steps.append(Instruction(InstructionKind.RECEIVE_GRADIENT, m))
        if m == 0:
            steps.append(Instruction(InstructionKind.REDUCE, m))
        steps.append(Instruction(InstructionKind.BACKWARD, m))
        if stage > 0 or input_gradient:
            steps.append(Instruction(InstructionKind.SEND_GRADIENT, m))
    if driver and input_gradient:
        # At the end: the driver must send all gradients before it waits for those of the inputs.
        steps += [
            Instruction(InstructionKind.RECEIVE_INPUT_GRADIENT, m)
            for m in reversed(range(microbatches))
        ]
    return tuple(steps)
