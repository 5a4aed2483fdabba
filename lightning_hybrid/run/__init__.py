"""One run of a Trainer or Fabric: its data, the session of a driver, choice of sizes, its parts."""

from lightning_hybrid.run.building import (
    BetweenRuns,
    Building,
    leave_on_cpu,
    move_module,
)
from lightning_hybrid.run.checkpoint_io import with_atomic_writes
from lightning_hybrid.run.framework import FabricFramework
from lightning_hybrid.run.part import Part
from lightning_hybrid.run.rehearsed_sizes import choose_on_rank_0, say_chain, why_chain
from lightning_hybrid.run.replica_world import (
    LauncherRanks,
    ReplicaWorld,
    ShownRanks,
    asked_by_framework,
    refuse_other_shards,
)
from lightning_hybrid.run.run import Run, scalers_of
from lightning_hybrid.run.session import DriverSession
