"""Which shape: the plan, the simulator that times it, and the search that finds it."""

from lightning_hybrid.planning.plan import Plan, StagePlan
from lightning_hybrid.planning.search import plan_stages

__all__ = ["Plan", "StagePlan", "plan_stages"]
