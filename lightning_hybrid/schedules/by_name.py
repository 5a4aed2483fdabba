"""The schedules of one call of the network, by their names."""

from collections.abc import Callable

from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import Schedule
from lightning_hybrid.schedules.looped import looped
from lightning_hybrid.schedules.streamed import STREAMED
from lightning_hybrid.schedules.zero_bubble import NAME, zero_bubble

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "looped": looped,
    NAME: zero_bubble,
    # A streamed schedule says when batches begin. Within one call of the network each stage does
    # what it does under fill-drain: nothing goes back before all outputs are there.
    **dict.fromkeys(STREAMED, gpipe),
}
"""By the name of a schedule, what each rank does in one call of the network."""


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    *,
    input_gradient: bool = False,
    split: tuple[int, ...] | None = None,
) -> Schedule:
    """Make a schedule by its name.

    Args:
        name: In `SCHEDULES`.
        stages: Number of stages.
        microbatches: Number of micro-batches.
        input_gradient: Whether the driver wants the gradient of the network's inputs.
        split: Of `zero_bubble`, numbers of the stages whose backward is split; None: of all that
            may be.
    """
    more = {"split": split} if name == NAME else {}
    return SCHEDULES[name](stages, microbatches, input_gradient=input_gradient, **more)
