"""What is chosen where the user leaves it open: the schedule, and whether forwards run twice."""

from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.plan import Plan

AUTO = "auto"
MARGIN = 0.05
"""Share of a step that another schedule must save to be taken in place of fill-drain. Predictions
are not better than that: they do not know the time between two instructions, and the others have
more of these."""


def plan_by_schedule(
    schedule: str, plan_with: Callable[[str], Plan], *, contiguous: bool, measured: bool
) -> Plan:
    """Make a plan, with a schedule that is chosen if it is not given.

    Delayed schedules are never chosen: they train another model. Nor are streamed ones, which ask
    something of the training step that no plan can know.

    Args:
        schedule: Its name, or `auto`.
        plan_with: Makes the plan with the schedule of this name.
        contiguous: Whether each device is to have one stage. So may its backward be split; several
            stages may be in a loop.
        measured: Whether times are known. Else fill-drain is taken.
    """
    if schedule != AUTO:
        return plan_with(schedule)
    best = plan_with("gpipe")
    if best.stages == 1 or not measured:
        return best
    try:
        other = plan_with("zero_bubble" if contiguous else "looped")
    except PlanError:  # too few partitions for a loop
        return best
    return other if other.step_s < (1 - MARGIN) * best.step_s else best


def plan_within_memory(
    recompute: bool | Literal["auto"], plan_with: Callable[[bool], Plan]
) -> Plan:
    """Make a plan, of stages that compute their activations again where nothing else fits.

    Args:
        recompute: Whether they do; `auto`: where without it no placement is found.
        plan_with: Makes the plan, with recomputation or without.

    Raises:
        PlanError: There is no placement.
    """
    if isinstance(recompute, bool):
        return plan_with(recompute)
    with suppress(PlanError):
        return plan_with(False)
    return plan_with(True)
