"""Planning: costs of partitions, predicted step times and memory, search for cuts and sizes."""

from lightning_hybrid.planning.called_network import CalledNetwork
from lightning_hybrid.planning.chains import best_chain, fair_ends
from lightning_hybrid.planning.cluster import (
    Cluster,
    Device,
    Rates,
    given_speeds,
    measured_speeds,
    memory_of_rank,
    want_second_look,
    with_second_look,
)
from lightning_hybrid.planning.copied_stages import (
    CopiedStages,
    best_cuts,
    of_slowest,
    owners_of,
)
from lightning_hybrid.planning.device_speed import look_at, measure_speed, update_s_per_byte
from lightning_hybrid.planning.looped_placements import improved
from lightning_hybrid.planning.measure import device_name
from lightning_hybrid.planning.memory_check import Fit, Way, gigabytes, what_lacks, what_would_fit
from lightning_hybrid.planning.memory_free import (
    free_addresses,
    free_bytes,
    free_of_host,
    free_on,
    return_freed,
)
from lightning_hybrid.planning.memory_needed import ASSUMED_TENSORS, optimizer_bytes
from lightning_hybrid.planning.partition_table import PartitionTable, count
from lightning_hybrid.planning.plan import Plan, check_fields
from lightning_hybrid.planning.plan_page import plan_page
from lightning_hybrid.planning.planner import Site, make_plan, plan_again
from lightning_hybrid.planning.search import AUTO, Method, Objective, PlanSettings
from lightning_hybrid.planning.shares import batch_sizes, deal
from lightning_hybrid.planning.sizes import Machine, Prediction, Sizes
from lightning_hybrid.planning.step_problem import Links, StepProblem
from lightning_hybrid.planning.step_time import speedup
