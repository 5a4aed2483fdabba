"""The processes of a run: their start, how they find each other, failures, and their end."""

from lightning_hybrid.process.children import Children
from lightning_hybrid.process.device_survey import look_around
from lightning_hybrid.process.faults import (
    Watch,
    first_fault,
    is_loss,
    read_fault,
    say_at_next_meeting,
)
from lightning_hybrid.process.joining import (
    LETTING_GO_S,
    Everyone,
    Joined,
    Meeting,
    forget,
    gather,
    has_met,
    join,
    make_store,
)
from lightning_hybrid.process.launcher import (
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    Part,
    Parted,
)
from lightning_hybrid.process.run_results import (
    Results,
    Snapshot,
    TrainerResults,
    adopt_results,
    collect_results,
)
from lightning_hybrid.process.wrong_package import refuse_in_other_package

__all__ = [
    "LETTING_GO_S",
    "Children",
    "Everyone",
    "HybridMultiProcessingLauncher",
    "HybridSubprocessLauncher",
    "Joined",
    "Meeting",
    "Part",
    "Parted",
    "Results",
    "Snapshot",
    "TrainerResults",
    "Watch",
    "adopt_results",
    "collect_results",
    "first_fault",
    "forget",
    "gather",
    "has_met",
    "is_loss",
    "join",
    "look_around",
    "make_store",
    "read_fault",
    "refuse_in_other_package",
    "say_at_next_meeting",
]
