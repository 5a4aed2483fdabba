"""Planning: from costs of partitions to cuts and sizes, with predicted step times and memory."""

from lightning_hybrid.planning.cluster_description import ClusterDescription, DeviceSpec, Level
from lightning_hybrid.planning.fastest_sizes import Machine, fastest_sizes
from lightning_hybrid.planning.memory_check import gigabytes
from lightning_hybrid.planning.microbatch_numbers import default_number
from lightning_hybrid.planning.partition_table import COUNTED, PartitionTable, TiedWeight
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.plan_page import plan_page
from lightning_hybrid.planning.planner import NetworkCosts, Site, make_plan, plan_again
from lightning_hybrid.planning.run_cluster import (
    Cluster,
    Device,
    Rates,
    average_equal_devices,
    equal_devices_differ,
    given_speeds,
    measured_speeds,
    memory_of_rank,
)
from lightning_hybrid.planning.search import AUTO, Method, PlanObjective, PlanSettings
from lightning_hybrid.planning.shape_costs import CostsOf
from lightning_hybrid.planning.shapes import (
    Shape,
    ShapeRequest,
    Sizes,
    plans_of,
    rank_shapes,
    recommended,
)
from lightning_hybrid.planning.shares import batch_sizes, share_samples
from lightning_hybrid.planning.step_time import speedup
from lightning_hybrid.planning.units import parse, spell
