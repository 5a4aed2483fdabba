"""What a network is made of: traced into layers, grouped into partitions, cut into stages."""

from lightning_hybrid.network.graph import NetworkGraph, describe, signature
from lightning_hybrid.network.partition import (
    NetworkPartition,
    find_boundary,
    network_partitions,
)
from lightning_hybrid.network.stage import Stage, cut
from lightning_hybrid.network.tracing import trace

__all__ = [
    "NetworkGraph",
    "NetworkPartition",
    "Stage",
    "cut",
    "describe",
    "find_boundary",
    "network_partitions",
    "signature",
    "trace",
]
