"""What each rank does, in order: pure data, executed by the runtime, timed and drawn elsewhere."""

from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.schedules.instructions import (
    Instruction,
    Kind,
    Schedule,
    Step,
    check,
    draw,
    execute,
    execute_merged,
)
from lightning_hybrid.schedules.merged import merge

SCHEDULES = {"gpipe": gpipe}
"""The schedules by the name they have in a plan."""

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Kind",
    "Schedule",
    "Step",
    "check",
    "draw",
    "execute",
    "execute_merged",
    "gpipe",
    "merge",
]
