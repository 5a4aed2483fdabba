"""Make a schedule, for one call of the network, by its name."""

from collections.abc import Callable
from typing import Any

from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import Schedule
from lightning_hybrid.schedules.looped import looped
from lightning_hybrid.schedules.one_f_one_b import INSIDE, one_f_one_b
from lightning_hybrid.schedules.streamed import STREAMED
from lightning_hybrid.schedules.zero_bubble import NAME, zero_bubble

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "looped": looped,
    NAME: zero_bubble,
    INSIDE: one_f_one_b,
    # A streamed schedule says when batches begin. Within one call of the network each stage does
    # what it does under fill-drain: no backward begins before all outputs are computed.
    **dict.fromkeys(STREAMED, gpipe),
}
"""By name, the function that makes the schedule for one call of the network."""

SPLITTING = (NAME, INSIDE)
"""Names of the schedules under which the backward of a stage may be split in two parts: their
functions take the argument ``split``."""


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    *,
    input_gradient: bool = False,
    split: tuple[int, ...] | None = None,
) -> Schedule:
    """Make the schedule for one call of the network, by its name.

    A streamed schedule gives the lists of `gpipe`: it says only when batches begin. Copies of
    stages, and devices with several stages, come later: `deal` and `by_device` change the lists.

    Args:
        name: A key of `SCHEDULES`.
        stages: Number of stages; the last one is the driver's.
        microbatches: Number of micro-batches.
        input_gradient: Whether the driver wants the gradient of the network's inputs, which stage 0
            then sends it; must be False under `1f1b`.
        split: Numbers of the stages whose backward is split; None: under `zero_bubble` all but the
            first, under `1f1b` none. Other schedules ignore it.

    Raises:
        PlanError: a number is less than one, or the schedule cannot have these options.
    """
    more: dict[str, Any] = {"split": split} if name in SPLITTING and split is not None else {}
    return SCHEDULES[name](stages, microbatches, input_gradient=input_gradient, **more)
