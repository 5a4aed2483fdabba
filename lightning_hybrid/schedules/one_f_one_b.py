"""One forward, one backward: a stage runs a backward as soon as its gradient can be there.

All backwards are in the forward list: they run inside of the call of the network, with the gradient
that the loss is expected to give. The backward list is empty.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from lightning_hybrid.errors import PlanError
from lightning_hybrid.schedules.instructions import (
    Instruction,
    InstructionKind,
    PlacedInstruction,
    Schedule,
)
from lightning_hybrid.schedules.zero_bubble import check_split

INSIDE = "1f1b"
"""Name of the schedule whose backwards run inside of a call of the network."""


def one_f_one_b(
    stages: int,
    microbatches: int,
    *,
    input_gradient: bool = False,
    falls: bool = False,
    split: Collection[int] = (),
) -> Schedule:
    """Make the schedule of one forward, one backward, for one call of the network.

    It looks like this for three stages, where a number in brackets is a backward. Stage k of S,
    counted from 0, keeps activations of at most S - k micro-batches::

        stage 0   0  1  2  .  . (0) 3 (1) . (2) . (3)
        stage 1   .  0  1  . (0) 2 (1) 3 (2) . (3)
        stage 2   .  .  0 (0) 1 (1) 2 (2) 3 (3)

    A stage whose backward is split computes the gradients of its weights later: stage k does so
    when it has run the backwards of k more micro-batches. So the stage before it gets its gradients
    early, and gaps are filled. Stage k then keeps something of k more micro-batches, S in all.

    Args:
        stages: Number of stages; the last one is the driver's.
        microbatches: Number of micro-batches.
        input_gradient: Must be False: gradients of the network's inputs are not kept.
        falls: Whether micro-batches run from the last to the first. Gradients are then added up in
            the order of autograd, and of fill-drain; running statistics (batch normalisation) need
            the order from the first to the last.
        split: Numbers of the stages whose backward is split; by default there are none.

    Raises:
        PlanError: `stages` or `microbatches` is less than one, `input_gradient` is True, or `split`
            has the first stage, or one that does not exist.

    References: Narayanan et al., PipeDream-Flush (arXiv 2006.09503); Qi et al., ZB-H1 (arXiv
    2401.10241).
    """
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise PlanError(f"{name}({value}) must be at least 1")
    if input_gradient:
        raise PlanError(f"schedule {INSIDE!r} has no gradients of the network's inputs")
    check_split(split, stages)
    order = [*reversed(range(microbatches))] if falls else [*range(microbatches)]
    return Schedule(
        name=INSIDE,
        stages=stages,
        microbatches=microbatches,
        forward=tuple(_steps(k, stages, order, k if k in split else None) for k in range(stages)),
        backward=((),) * stages,
    )


def _steps(
    stage: int, stages: int, order: Sequence[int], delay: int | None
) -> tuple[Instruction, ...]:
    """Make the instruction list of a stage for one forward, one backward.

    Args:
        stage: number of the stage.
        stages: number of all stages.
        order: numbers of the micro-batches, in the order in which they run.
        delay: number of further backwards after which the WEIGHT of a micro-batch follows; None:
            the backward of the stage is not split, and there is no WEIGHT.
    """
    driver, ahead = stage == stages - 1, stages - 1 - stage
    # Inputs are sent when stage 0 is about to take them: with two stages gradients go to the same
    # rank, and both ends of a link must have its messages in one order.
    sent = order if driver and stages > 1 else []
    steps = [Instruction(InstructionKind.SEND_INPUT, m) for m in sent[:stages]]
    steps += [step for m in order[:ahead] for step in _forward(stage, stages, m)]
    late: list[int] = []
    for place, m in enumerate(order):
        for n in order[place + ahead :][:1]:
            steps += _forward(stage, stages, n)
        if m == order[-1] and delay is None:  # (it completes the gradients)
            steps += _backward(stage, stages, m, reduces=True)
        else:
            steps += _backward(stage, stages, m)
        steps += [Instruction(InstructionKind.SEND_INPUT, n) for n in sent[place + stages :][:1]]
        if delay is not None:
            late.append(m)
            if len(late) > delay:
                steps.append(Instruction(InstructionKind.WEIGHT, late.pop(0)))
    if delay is not None:
        steps += [Instruction(InstructionKind.WEIGHT, m) for m in late]
        steps.insert(len(steps) - 1, Instruction(InstructionKind.REDUCE, order[-1]))
    return tuple(steps)


def _forward(stage: int, stages: int, microbatch: int) -> list[Instruction]:
    kinds = [InstructionKind.RECEIVE_ACTIVATION] * (stages > 1) + [InstructionKind.FORWARD]
    kinds += [InstructionKind.SEND_ACTIVATION] * (stage < stages - 1)
    return [Instruction(kind, microbatch) for kind in kinds]


def _backward(
    stage: int, stages: int, microbatch: int, *, reduces: bool = False
) -> list[Instruction]:
    kinds = [InstructionKind.RECEIVE_GRADIENT] * (stage < stages - 1) + [
        InstructionKind.REDUCE
    ] * reduces
    kinds += [InstructionKind.BACKWARD] + [InstructionKind.SEND_GRADIENT] * (stage > 0)
    return [Instruction(kind, microbatch) for kind in kinds]


def interleaved(
    devices: int, rounds: int, order: Sequence[int]
) -> tuple[tuple[PlacedInstruction, ...], ...]:
    """Make the list of each device for `1f1b` in a loop (see `loop_order`).

    No backward is split. A device takes its stages in turn, each for one group of micro-batches. A
    group has at least as many micro-batches as there are devices, if there are so many in all. A
    device begins with as many forwards as it has time for before the first backward can come; then
    backwards and forwards alternate. For two devices, v = 2 rounds and two micro-batches, as
    (stage).(micro-batch), where a backward is in brackets::

        device 0   .   1.0  1.1  3.0 (3.0) 3.1 (3.1)(1.0)(1.1)
        device 1  0.0  0.1  2.0  2.1   .  (2.0)  . (2.1)(0.0)(0.1)

    If devices are equal, messages cost nothing and there are at least as many micro-batches as
    devices, a step takes as long as under fill-drain in a loop, (M + (S - 1) / v)(F + B).

    Args:
        devices: Number of devices.
        rounds: Number of stages of each device.
        order: Numbers of the micro-batches, in the order in which they run.

    Returns:
        By device, the driver's first: its instructions in order, as `(number of the stage,
        instruction)`.

    Reference: Narayanan et al. (arXiv 2104.04473).
    """
    count = max(1, len(order) // devices)
    size, more = divmod(len(order), count)
    # the first groups take one more, so that no group is smaller than the number of devices
    bounds = [number * size + min(number, more) for number in range(count + 1)]
    groups = [order[a:b] for a, b in pairwise(bounds)]
    place = [devices - 1, *range(devices - 1)]  # (the driver is the last of a round)
    return tuple(_turns(place[device], devices, rounds, groups) for device in range(devices))


def most_in_loops(devices: int, microbatches: int) -> int:
    """Most micro-batches whose activations a device holds at once under `1f1b` in a loop.

    A micro-batch counts as one if the device holds its activations of all of the device's stages,
    and as a half if of one of two. The result, rounded up, is for two equal stages per device,
    which need the most; it may be larger than `microbatches`.

    Args:
        devices: Number of devices.
        microbatches: Number of micro-batches.
    """
    group = -(-microbatches // max(1, microbatches // devices))
    return -(-(2 * devices - 1 + group) // 2)


def _turns(
    place: int, devices: int, rounds: int, groups: Sequence[Sequence[int]]
) -> tuple[PlacedInstruction, ...]:
    stages, first, last = devices * rounds, groups[0], groups[-1][-1]
    own = range(place, stages, devices)
    forwards = [(stage, m) for group in groups for stage in own for m in group]
    backwards = [(stage, m) for group in groups for stage in reversed(own) for m in group]
    ahead = min(2 * (devices - 1 - place) + (rounds - 1) * len(first) + 1, len(forwards))
    steps: list[PlacedInstruction] = []
    if place == devices - 1:
        steps += [
            (stages - 1, Instruction(InstructionKind.SEND_INPUT, m))
            for group in groups
            for m in group
        ]
    for stage, m in forwards[:ahead]:
        steps += [(stage, step) for step in _forward(stage, stages, m)]
    for number, (stage, m) in enumerate(backwards):
        steps += [(stage, step) for step in _backward(stage, stages, m, reduces=m == last)]
        for later, n in forwards[ahead + number :][:1]:
            steps += [(later, step) for step in _forward(later, stages, n)]
    return tuple(steps)
