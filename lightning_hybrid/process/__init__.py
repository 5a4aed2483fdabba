"""The processes of a run: their start, how they find each other, failures, and their end."""

from lightning_hybrid.process.children import (
    Children,
    keep_ranks,
    leave_nobody,
    miss_nobody,
)
from lightning_hybrid.process.device_survey import (
    cluster_of,
    look_around,
)
from lightning_hybrid.process.first_fault import is_loss, is_unnamed_loss, read_fault
from lightning_hybrid.process.joining import (
    LETTING_GO_S,
    History,
    Meeting,
    drop_group,
    drop_what_driver_lacks,
    has_met,
    history,
    join,
    make_store,
    reach,
    store_of_all,
)
from lightning_hybrid.process.killed_ranks import KilledRanksWatch
from lightning_hybrid.process.late_drivers import (
    Choice,
    LateWorld,
    wait_for_late_drivers,
)
from lightning_hybrid.process.servers import (
    EndOrder,
    JoinOrder,
    Order,
    RestOrder,
    ServeOrder,
    Servers,
    end_servers,
    give,
    latest_order,
    orders,
    start_server,
)
from lightning_hybrid.process.world import NoWorld, Phase, World
