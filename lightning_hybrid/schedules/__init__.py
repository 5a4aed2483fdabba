"""What each rank does, in order: pure data, executed by the runtime, timed and drawn elsewhere."""

from collections.abc import Callable

from lightning_hybrid.schedules.dealt import (
    Copy,
    DealtSchedule,
    check_copies,
    collected,
    deal,
    together,
)
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import Instruction, Kind, Schedule, execute_merged
from lightning_hybrid.schedules.looped import MOST_ROUNDS, loop_order, looped
from lightning_hybrid.schedules.merged import merge
from lightning_hybrid.schedules.streamed import (
    STREAMED,
    DelayedWeights,
    LookAhead,
    Orders,
    Part,
    Work,
)
from lightning_hybrid.schedules.zero_bubble import zero_bubble

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "looped": looped,
    "zero_bubble": zero_bubble,
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
    more = {"split": split} if name == "zero_bubble" else {}
    return SCHEDULES[name](stages, microbatches, input_gradient=input_gradient, **more)


__all__ = [
    "MOST_ROUNDS",
    "SCHEDULES",
    "STREAMED",
    "Copy",
    "DealtSchedule",
    "DelayedWeights",
    "Instruction",
    "Kind",
    "LookAhead",
    "Orders",
    "Part",
    "Schedule",
    "Work",
    "check_copies",
    "collected",
    "deal",
    "execute_merged",
    "loop_order",
    "make_schedule",
    "merge",
    "together",
]
