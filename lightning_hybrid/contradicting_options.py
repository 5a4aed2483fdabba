"""Options of the strategies that contradict each other: which ones, why, and a way out.

:class:`~lightning_hybrid.config.Config` says what the user has asked for, and has it checked here.
"""

from collections.abc import Mapping

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import Plan

LEAVE_ONE = "Leave one of them out."

PAIRS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "zero_bubble": (("free",), "gives each device one stage", LEAVE_ONE),
    "cuts": (
        ("free",),
        "are cut points, which give each device one stage",
        "Leave one of them out, or give plan=Plan(..., devices=...), which says where each stage "
        "goes.",
    ),
    "one stage": (
        ("recompute",),
        "makes no stages",
        "Leave one of them out, or call torch.utils.checkpoint in the network.",
    ),
    "recompute": (
        # (a batch of a stream is under way while later ones begin: its weights may be gone)
        ("streamed",),
        "is for schedules that finish a batch before the next one",
        "Leave it out; delayed schedules have Delayed(NAME, weights='recompute').",
    ),
    "device": (("streamed",), "draws in the order of one device", LEAVE_ONE),
    "sharded_async": (
        ("divided",),
        "makes copies on replica 0",
        "Use checkpoint=Sharded() or 'full'.",
    ),
    "new cuts": (
        (
            "one stage",
            "asgd",
            "speed",
            "plan",
            "copies",
            "cuts",
            "streamed",
            "looped",
            "compiled",
            "divided",
        ),
        "cuts stages anew where a device turns out slower",
        "Leave one of them out, or use replicas=BySpeed(replan='epoch'): several replicas then get "
        "other parts of each batch.",
    ),
    "copies": (
        (
            "streamed",
            "looped",
            "zero_bubble",
            "inside",
            "free",
            "speed",
            "divided",
            "sharded",
            "device",
        ),
        "gives stages copies",
        "Leave the latter out, or use pipeline_parallel_size={devices}.",
    ),
    # (the driver's copy of the last stage borrows its weights)
    "copies of the last": (
        ("compiled",),
        "gives the last stage copies",
        "Leave the latter out, or use pipeline_parallel_size={devices}.",
    ),
    "asgd": (
        ("stages", "speed", "streamed", "sharded"),
        "is for replicas of one stage that do not wait for each other",
        LEAVE_ONE,
    ),
    "continue": (
        ("sharded", "streamed", "inside"),
        "averages gradients once for each batch, and keeps weights whole",
        LEAVE_ONE,
    ),
}
"""Options that contradict others, by their names in the argument ``asked`` of `check_pairs`.

Each stands before the options that it contradicts, the reason (the rest of a sentence that begins
with it), and advice."""


def check_pairs(asked: Mapping[str, str], devices: int | None) -> None:
    """Check that no two options that the user has asked for contradict each other.

    Args:
        asked: the options that the user has asked for: by name the argument, as text for a message
            (``"recompute=True"``).
        devices: number of devices of a replica, for the advice; ``None``: it is left open.

    Raises:
        PlanError: two of them contradict each other.
    """
    for one, (others, why, advice) in PAIRS.items():
        for other in others:
            if one in asked and other in asked:
                raise PlanError(
                    f"{asked[one]} {why}, and does not go together with {asked[other]}. "
                    f"{advice.format(devices=devices)}"
                )


def check_plan(shown: str, name: str, plan: Plan | None) -> None:
    """Check that the schedule does not contradict the plan.

    Args:
        shown: the argument by which the user asks for the schedule, as text for a message.
        name: name of the schedule.
        plan: the user's plan; ``None``: there is none.

    Raises:
        PlanError: the plan has another schedule.
    """
    if plan is not None and plan.schedule != name:
        raise PlanError(
            f"{shown} contradicts the plan, whose schedule is {plan.schedule!r}. {LEAVE_ONE}"
        )
