"""Profiling: what networks and devices take, measured or counted, as numbers for the planner."""

from lightning_hybrid.profiling.called_network import CalledNetwork
from lightning_hybrid.profiling.device_speed import (
    describe_device,
    measure_speed,
    update_s_per_byte,
)
from lightning_hybrid.profiling.measure import device_name
from lightning_hybrid.profiling.memory_free import (
    free_addresses,
    free_bytes,
    free_of_host,
    free_on,
    give_back_memory,
)
from lightning_hybrid.profiling.network_table import count, states_of_partitions
from lightning_hybrid.profiling.optimizer_states import ASSUMED_TENSORS, optimizer_bytes
