"""Which shape: the plan, the simulator that times it, and the search that finds it."""

from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan, StagePlan
from lightning_hybrid.planning.search import plan_stages

__all__ = ["PartitionTable", "Plan", "StagePlan", "plan_stages"]
