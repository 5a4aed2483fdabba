"""What each rank does, in order: pure data, executed by the runtime, timed and drawn elsewhere."""

from lightning_hybrid.schedules.akintoye import AKINTOYE
from lightning_hybrid.schedules.ddg import DDG
from lightning_hybrid.schedules.fdg import FDG
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
from lightning_hybrid.schedules.look_ahead import LookAhead
from lightning_hybrid.schedules.looped import looped
from lightning_hybrid.schedules.merged import merge
from lightning_hybrid.schedules.one_f_one_b import ONE_F_ONE_B
from lightning_hybrid.schedules.pipedream import PIPEDREAM

STREAMED = {each.name: each for each in (ONE_F_ONE_B, PIPEDREAM, DDG, FDG, AKINTOYE)}
"""The streamed schedules by the name they have in a plan."""

SCHEDULES = {"gpipe": gpipe, "looped": looped, **dict.fromkeys(STREAMED, gpipe)}
"""By the name of a schedule, what each rank does in one call of the network."""

__all__ = [
    "SCHEDULES",
    "STREAMED",
    "Instruction",
    "Kind",
    "LookAhead",
    "Schedule",
    "Step",
    "check",
    "draw",
    "execute",
    "execute_merged",
    "gpipe",
    "looped",
    "merge",
]
