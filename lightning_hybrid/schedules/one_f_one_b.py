"""One forward, one backward: a stage runs a backward as soon as its gradient can be there.

All backwards are in the forward list: they run inside of the call of the network, with the gradient
that is expected of the loss. The backward list is empty.
"""

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.instructions import Instruction, InstructionKind, Schedule

INSIDE = "1f1b"
"""Name of the schedule whose backwards run inside of a call of the network."""


def one_f_one_b(
    stages: int, microbatches: int, *, input_gradient: bool = False, falls: bool = False
) -> Schedule:
    """Make the schedule of `stages` stages and `microbatches` micro-batches.

    It looks like this for three stages, where a number in brackets is a backward. Stage k keeps
    what at most S - k micro-batches need, counted from 0::

        stage 0   0  1  2  .  . (0) 3 (1) . (2) . (3)
        stage 1   .  0  1  . (0) 2 (1) 3 (2) . (3)
        stage 2   .  .  0 (0) 1 (1) 2 (2) 3 (3)

    Args:
        stages: Number of stages; the last one is the driver's.
        microbatches: Number of micro-batches.
        input_gradient: Must be False: gradients of the network's inputs are not kept.
        falls: Whether micro-batches run from the last to the first. Gradients are then added up in
            the order of autograd, and of fill-drain; running statistics want the other order.

    Raises:
        PlanError: `stages` or `microbatches` is less than one, or `input_gradient` is given.

    Reference: Narayanan et al., PipeDream-Flush (arXiv 2006.09503).
    """
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise PlanError(f"{name}({value}) must be at least 1")
    if input_gradient:
        raise PlanError(f"schedule {INSIDE!r} has no gradients of the network's inputs")
    order = [*reversed(range(microbatches))] if falls else [*range(microbatches)]
    return Schedule(
        name=INSIDE,
        stages=stages,
        microbatches=microbatches,
        forward=tuple(_steps(stage, stages, order) for stage in range(stages)),
        backward=((),) * stages,
    )


def _steps(stage: int, stages: int, order: list[int]) -> tuple[Instruction, ...]:
    driver, ahead = stage == stages - 1, stages - 1 - stage
    forward = [InstructionKind.RECEIVE_ACTIVATION] * (stages > 1) + [InstructionKind.FORWARD]
    backward = [InstructionKind.RECEIVE_GRADIENT] * (not driver) + [InstructionKind.BACKWARD]
    forward += [InstructionKind.SEND_ACTIVATION] * (not driver)
    backward += [InstructionKind.SEND_GRADIENT] * (stage > 0)
    # Inputs are sent when stage 0 is about to take them: with two stages gradients go to the same
    # rank, and both ends of a link must have its messages in one order.
    sent = order if driver and stages > 1 else []
    steps = [Instruction(InstructionKind.SEND_INPUT, m) for m in sent[:stages]]
    steps += [Instruction(kind, m) for m in order[:ahead] for kind in forward]
    for place, m in enumerate(order):
        steps += [Instruction(kind, n) for n in order[place + ahead :][:1] for kind in forward]
        if m == order[-1]:  # (with it the gradients are complete, and are averaged beside it)
            backward.insert(backward.index(InstructionKind.BACKWARD), InstructionKind.REDUCE)
        steps += [Instruction(kind, m) for kind in backward]
        steps += [Instruction(InstructionKind.SEND_INPUT, n) for n in sent[place + stages :][:1]]
    return tuple(steps)
