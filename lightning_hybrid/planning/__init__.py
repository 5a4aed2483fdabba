"""Which shape: the plan, the simulator that times it, and the search that finds it."""

from lightning_hybrid.planning.cluster import (
    TOLERANCE,
    Cluster,
    Device,
    Rates,
    given_speeds,
    memory_of_rank,
    want_second_look,
    with_second_look,
)
from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.device_speed import look_at, measure_speed, update_s_per_byte
from lightning_hybrid.planning.memory import ASSUMED_TENSORS, optimizer_bytes
from lightning_hybrid.planning.memory_limits import (
    free_addresses,
    free_bytes,
    free_of_host,
    free_on,
)
from lightning_hybrid.planning.partition_costs import capture_call, counted_parts, measured_parts
from lightning_hybrid.planning.partition_table import PartitionTable, measured_table
from lightning_hybrid.planning.performance import PerformanceModel, fit
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.plan_page import Section, plan_page
from lightning_hybrid.planning.planner import make_plan
from lightning_hybrid.planning.search import AUTO, Method, PlanSettings
from lightning_hybrid.planning.shapes import CostsOf, Shape, fastest, plan_of, rank_shapes
from lightning_hybrid.planning.sizes import Machine, Sizes, choose
from lightning_hybrid.planning.step_time import speedup
from lightning_hybrid.planning.would_fit import gigabytes

__all__ = [
    "ASSUMED_TENSORS",
    "AUTO",
    "TOLERANCE",
    "Cluster",
    "ClusterDescription",
    "CostsOf",
    "Device",
    "DeviceSpec",
    "Level",
    "Machine",
    "Method",
    "PartitionTable",
    "PerformanceModel",
    "Plan",
    "PlanSettings",
    "Rates",
    "Section",
    "Shape",
    "Sizes",
    "capture_call",
    "choose",
    "counted_parts",
    "fastest",
    "fit",
    "free_addresses",
    "free_bytes",
    "free_of_host",
    "free_on",
    "gigabytes",
    "given_speeds",
    "look_at",
    "make_plan",
    "measure_speed",
    "measured_parts",
    "measured_table",
    "memory_of_rank",
    "optimizer_bytes",
    "plan_of",
    "plan_page",
    "rank_shapes",
    "speedup",
    "update_s_per_byte",
    "want_second_look",
    "with_second_look",
]
