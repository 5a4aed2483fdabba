"""Fill-drain with split backwards: gradients of inputs are sent before those of weights are made.

A backward has two parts: the gradients of a stage's inputs (B), for which the stage before it
waits, and those of its weights (W), for which no rank waits before the step. A stage that is split
computes B, sends it, and then computes W. Delaying W further gains nothing if stages are equal: the
first stage, which is never split, is busy without a gap from the first gradient that it gets,
S - 1 times B after the backward pass has begun. With equal stages a step takes (S - 1) W less than
under fill-drain, and no more memory.

A split backward may take longer than a joint one, so each stage is split only where that pays.
(The orders of the literature alternate forwards and backwards. They need a loss in the network:
`lightning_hybrid.schedules.one_f_one_b`.)
"""

from collections.abc import Collection
from dataclasses import replace

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import Instruction, InstructionKind, Schedule

NAME = "zero_bubble"


def zero_bubble(
    stages: int,
    microbatches: int,
    *,
    input_gradient: bool = False,
    split: Collection[int] | None = None,
) -> Schedule:
    """Make the schedule of fill-drain with split backwards.

    It looks like this for three stages, where ``w`` is the weight part of the backward before it (a
    backward that is not split takes as long as its two parts)::

        stage 0   0 1 2 . . | . . 2 . 1 . 0
        stage 1   . 0 1 2 . | . 2 w 1 w 0 w
        stage 2   . . 0 1 2 | 2 w 1 w 0 w .

    Args:
        stages: Number of stages; the last one is the driver's.
        microbatches: Number of micro-batches.
        input_gradient: Whether the driver wants the gradient of the network's inputs.
        split: Numbers of the stages whose backward is split; None: all but the first.

    Raises:
        PlanError: `stages` or `microbatches` is less than one; or `split` has the first stage, or
            one that does not exist.

    Reference: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), for the split.
    """
    drained = gpipe(stages, microbatches, input_gradient=input_gradient)
    chosen = range(1, stages) if split is None else split
    check_split(chosen, stages)
    backward = tuple(
        _split(steps) if stage in chosen else steps for stage, steps in enumerate(drained.backward)
    )
    return replace(drained, name=NAME, backward=backward)


def check_split(split: Collection[int], stages: int) -> None:
    """Check the stages whose backward is to be split.

    Args:
        split: Numbers of these stages.
        stages: Number of all stages.

    Raises:
        PlanError: a number is that of the first stage, whose backward must not be split, or of a
            stage that does not exist.
    """
    for stage in split:
        if not 0 < stage < stages:
            raise PlanError(
                f"split({stage}) must be one of the stages 1..{stages - 1}: nobody waits for what "
                "stage 0 sends back"
            )


def _split(steps: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Split the backwards of a stage's list: a WEIGHT follows each SEND_GRADIENT.

    The REDUCE moves to before the last WEIGHT.

    Args:
        steps: the backward list of a stage of `gpipe`, not of the first one.
    """
    split: list[Instruction] = []
    for step in steps:
        if step.kind is InstructionKind.REDUCE:
            continue  # it goes before the last weight part instead, which makes gradients final
        split.append(step)
        if step.kind is InstructionKind.SEND_GRADIENT:
            if step.microbatch == 0:
                split.append(Instruction(InstructionKind.REDUCE, 0))
            split.append(Instruction(InstructionKind.WEIGHT, step.microbatch))
    return tuple(split)
