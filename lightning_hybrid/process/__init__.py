"""The processes of a run: their start, how they find each other, failures, and their end."""

from lightning_hybrid.process.children import Children
from lightning_hybrid.process.device_survey import look_around
from lightning_hybrid.process.faults import (
    FaultWatchdog,
    first_fault,
    is_loss,
    read_fault,
    say_at_next_meeting,
    tell_lost,
)
from lightning_hybrid.process.joining import (
    LETTING_GO_S,
    Everyone,
    Joined,
    Meeting,
    forget,
    has_met,
    join,
    make_store,
    meet_all,
    reach,
)
from lightning_hybrid.process.launcher import (
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    LaunchedFunction,
    LeaveTrainer,
)
from lightning_hybrid.process.run_results import (
    Results,
    Snapshot,
    TrainerResults,
    adopt_results,
    collect_results,
)
