"""What a network is made of: traced into layers, grouped into partitions, cut into stages."""

from lightning_hybrid.network.cache import cached
from lightning_hybrid.network.check import check, splits_along_batch
from lightning_hybrid.network.graph import NetworkGraph, describe, signature
from lightning_hybrid.network.measure import measure
from lightning_hybrid.network.partition import (
    NetworkPartition,
    find_boundary,
    network_partitions,
)
from lightning_hybrid.network.profile import PartitionProfile, Profile, count
from lightning_hybrid.network.stage import Stage, compiled, cut
from lightning_hybrid.network.tracing import trace

__all__ = [
    "NetworkGraph",
    "NetworkPartition",
    "PartitionProfile",
    "Profile",
    "Stage",
    "cached",
    "check",
    "compiled",
    "count",
    "cut",
    "describe",
    "find_boundary",
    "measure",
    "network_partitions",
    "signature",
    "splits_along_batch",
    "trace",
]
