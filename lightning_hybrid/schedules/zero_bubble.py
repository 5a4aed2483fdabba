"""Fill and drain with split backwards: the drain waits for gradients of inputs alone.

A backward has two parts: the gradients of a stage's inputs (B), for which the stage before it
waits, and those of its weights (W), for which nobody waits before the step. A stage that is split
sends the gradient of its inputs as soon as it has that, and then computes W. To put W off further
gains nothing where stages are equal: the first stage, which is never split, is busy without a gap
from the first gradient that it gets, S - 1 B after the drain began. Of equal stages a step takes
(S - 1) W less than fill-drain, and no more memory.

A split backward may take longer than a joint one, so each stage is split only where that pays.
(The orders of the literature alternate forwards and backwards. They cannot be run here, since the
driver has no loss to go back from before all outputs are there.)
"""

from collections.abc import Collection
from dataclasses import replace

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import Instruction, Kind, Schedule

NAME = "zero_bubble"


def zero_bubble(
    stages: int,
    microbatches: int,
    *,
    input_gradient: bool = False,
    split: Collection[int] | None = None,
) -> Schedule:
    """Make the schedule.

    It looks like this for three stages, where ``w`` is the weight part of the backward before it
    (a backward that is not split takes as long as its two parts)::

        stage 0   0 1 2 . . | . . 2 . 1 . 0
        stage 1   . 0 1 2 . | . 2 w 1 w 0 w
        stage 2   . . 0 1 2 | 2 w 1 w 0 w .

    Args:
        stages: Number of stages; the last one is the driver's.
        microbatches: Number of micro-batches.
        input_gradient: Whether the driver wants the gradient of the network's inputs.
        split: Numbers of the stages whose backward is split; None: of all but the first.

    Raises:
        PlanError: `stages` or `microbatches` is less than one; or the first stage is to be split,
            or one that does not exist.

    Reference: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), whose split it is.
    """
    drained = gpipe(stages, microbatches, input_gradient=input_gradient)
    chosen = range(1, stages) if split is None else split
    for stage in chosen:
        if not 0 < stage < stages:
            raise PlanError(
                f"split({stage}) must be one of the stages 1..{stages - 1}: nobody waits for what "
                "stage 0 sends back"
            )
    backward = tuple(
        _split(steps) if stage in chosen else steps for stage, steps in enumerate(drained.backward)
    )
    return replace(drained, name=NAME, backward=backward)


def _split(steps: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Send what the backward part has found, and go on with the weights."""
    split: list[Instruction] = []
    for step in steps:
        if step.kind is Kind.REDUCE:
            continue  # gradients are final with the last weight part
        split.append(step)
        if step.kind is Kind.SEND_GRADIENT:
            if step.microbatch == 0:
                split.append(Instruction(Kind.REDUCE, 0))
            split.append(Instruction(Kind.WEIGHT, step.microbatch))
    return tuple(split)
