"""The processes of a run: their start, how they find each other, failures, and their end."""

from lightning_hybrid.process.children import (
    Children,
    keep_ranks,
    leave_nobody,
    miss_nobody,
)
from lightning_hybrid.process.device_survey import know_machine, known_machine, look_around
from lightning_hybrid.process.faults import (
    is_loss,
    is_unnamed_loss,
    read_fault,
)
from lightning_hybrid.process.joining import (
    LETTING_GO_S,
    Everyone,
    History,
    Meeting,
    follow,
    has_met,
    history,
    join,
    make_store,
    meeting_at,
    reach,
)
from lightning_hybrid.process.killed_ranks import KilledRanks
from lightning_hybrid.process.servers import (
    JoinOrder,
    ServeOrder,
    Servers,
    dismiss_servers,
    give,
    orders,
    start_servers,
)
from lightning_hybrid.process.world import NoWorld, Phase, World
