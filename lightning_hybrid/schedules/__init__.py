"""Schedules: for each rank, the list of instructions that it executes in a step, as plain data."""

from lightning_hybrid.schedules.by_name import SCHEDULES, SPLITTING, make_schedule
from lightning_hybrid.schedules.dealt import (
    DealtSchedule,
    StageCopy,
    check_copies,
    collected,
    deal,
    together,
)
from lightning_hybrid.schedules.instructions import (
    BACKWARD_KINDS,
    Instruction,
    InstructionKind,
    Schedule,
    execute_merged,
)
from lightning_hybrid.schedules.looped import MOST_ROUNDS, loop_order
from lightning_hybrid.schedules.merged import by_device
from lightning_hybrid.schedules.one_f_one_b import INSIDE, most_in_loops, one_f_one_b
from lightning_hybrid.schedules.one_order import in_one_order
from lightning_hybrid.schedules.streamed import STREAMED, DelayedWeights, LookAhead
