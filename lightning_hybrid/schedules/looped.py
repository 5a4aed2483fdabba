"""The looped schedule: fill-drain with v stages per device, in v rounds over the S devices.

A micro-batch passes every device v times, in stages of 1 / v of the work, so that the pipeline
fills v times as fast: with equal devices and messages that cost nothing, a step takes
(M + (S - 1) / v) / (M + S - 1) of the time of fill-drain. v times as many cuts are crossed.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import Schedule

MOST_ROUNDS = 4
"""Largest number of stages per device that the planner considers for this schedule."""


def looped(stages: int, microbatches: int, *, input_gradient: bool = False) -> Schedule:
    """Make the looped schedule: the lists of `gpipe`, which `by_device` merges when they are run.

    It looks like this for two devices, v = 2 and three micro-batches, as (stage).(micro-batch)::

        device 1   0.0 0.1 0.2 2.0 2.1 2.2  .  |  .  2.2 2.1 0.2 2.0 0.1 0.0
        device 0    .  1.0 1.1 1.2 3.0 3.1 3.2 | 3.2 3.1 1.2 3.0 1.1 1.0  .

    Args:
        stages: Number of stages: v times the number of devices.
        microbatches: Number of micro-batches.
        input_gradient: Whether the driver wants the gradient of the network's inputs.

    Raises:
        PlanError: `stages` or `microbatches` is less than one.

    Reference: Narayanan et al. (arXiv 2104.04473), who combine it with 1F1B.
    """
    return replace(gpipe(stages, microbatches, input_gradient=input_gradient), name="looped")


def loop_order(devices: int, rounds: int) -> tuple[int, ...]:
    """The device of each stage in a loop: every round is 1, 2, ... and then 0, the driver's.

    Args:
        devices: Number of devices.
        rounds: Number of stages of each device.

    Returns:
        By stage, the number of its device: `(1, 0, 1, 0)` for two devices and two rounds.
    """
    return (*range(1, devices), 0) * rounds


def rounds_of(devices: Sequence[int]) -> int:
    """Number of stages of each device, if the stages form a loop.

    Args:
        devices: By stage, the number of its device; in a loop it is what `loop_order` returns.

    Returns:
        1 if each device has one stage, in this order; 0 if the stages have another order, or all
        have the same device.
    """
    count = len(set(devices))
    rounds, rest = divmod(len(devices), count)
    is_loop = count > 1 and not rest and tuple(devices) == loop_order(count, rounds)
    return rounds if is_loop else 0
