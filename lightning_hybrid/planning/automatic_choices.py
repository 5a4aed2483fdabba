"""What is chosen where the user leaves it open: the schedule, and whether forwards run twice."""

from collections.abc import Callable, Sequence
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
    recompute: bool | Literal["auto"],
    plan_with: Callable[[bool], Plan],
    limits: Sequence[int] | None = None,
) -> Plan:
    """Make a plan, of stages that compute their activations again where that is faster, or needed.

    It can be faster where memory alone says where the cuts are: with more room they are where the
    stages take equally long.

    Args:
        recompute: Whether they do; `auto`: where without it no placement is found, or one that is
            slower.
        plan_with: Makes the plan, with recomputation or without.
        limits: Bytes that each device may take; None: not known.

    Raises:
        PlanError: There is no placement.
    """
    if isinstance(recompute, bool):
        return plan_with(recompute)
    try:
        plan = plan_with(False)
    except PlanError:
        return plan_with(True)
    if limits is None or not _is_tight(plan, limits):
        return plan
    with suppress(PlanError):
        other = plan_with(True)
        if other.step_s < (1 - MARGIN) * plan.step_s:
            return other
    return plan


def _is_tight(plan: Plan, limits: Sequence[int]) -> bool:
    """Whether memory may have said where the cuts are: one more stage of a device fits nowhere."""
    held = [0] * len(limits)
    for row in plan.rows:
        held[row.device] += row.memory_bytes or 0
    return any(2 * size > limit for size, limit in zip(held, limits))
