"""What a network is made of: captured as a graph, grouped into partitions, cut into stages."""

from lightning_hybrid.network.batch_splitting import why_whole
from lightning_hybrid.network.cache import cached
from lightning_hybrid.network.capture import Capture, NotCaptured
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.measure import measure
from lightning_hybrid.network.partition import (
    NetworkPartition,
    find_boundary,
    network_partitions,
)
from lightning_hybrid.network.profile import PartitionProfile, Profile, count
from lightning_hybrid.network.stage import Stage, StageCode, compiled, cut, make_stages
from lightning_hybrid.network.stage_check import check

__all__ = [
    "Capture",
    "NetworkGraph",
    "NetworkPartition",
    "NotCaptured",
    "PartitionProfile",
    "Profile",
    "Stage",
    "StageCode",
    "cached",
    "check",
    "compiled",
    "count",
    "cut",
    "find_boundary",
    "make_stages",
    "measure",
    "network_partitions",
    "why_whole",
]
