"""What a network is made of: captured as a graph, grouped into partitions, cut into stages."""

from lightning_hybrid.network.batch_splitting import fits, why_whole
from lightning_hybrid.network.cache import cached
from lightning_hybrid.network.capture import Capture, NotCaptured, kind_of
from lightning_hybrid.network.graph import Leaf, NetworkGraph
from lightning_hybrid.network.input_views import views_of_inputs
from lightning_hybrid.network.matching_cuts import CannotFollow, follow
from lightning_hybrid.network.measure import clock_of, device_name, measure
from lightning_hybrid.network.own_classes import plain
from lightning_hybrid.network.partition import NetworkPartition, find_boundary, network_partitions
from lightning_hybrid.network.profile import PartitionProfile, Profile, count
from lightning_hybrid.network.rows import joined, slices
from lightning_hybrid.network.source_places import FAILS, place_now, place_of
from lightning_hybrid.network.split_backward import (
    CANNOT_BE_SPLIT,
    HookWatch,
    WeightPart,
    input_part,
    operations_behind,
)
from lightning_hybrid.network.stage import (
    Stage,
    StageCode,
    compiled,
    compute_whole,
    cut,
    cut_at,
    make_stages,
)
from lightning_hybrid.network.stage_check import check, with_room_for
from lightning_hybrid.network.watched_calls import (
    candidates,
    is_watched,
    own_forward,
    unwatch,
    watch,
)

__all__ = [
    "CANNOT_BE_SPLIT",
    "FAILS",
    "CannotFollow",
    "Capture",
    "HookWatch",
    "Leaf",
    "NetworkGraph",
    "NetworkPartition",
    "NotCaptured",
    "PartitionProfile",
    "Profile",
    "Stage",
    "StageCode",
    "WeightPart",
    "cached",
    "candidates",
    "check",
    "clock_of",
    "compiled",
    "compute_whole",
    "count",
    "cut",
    "cut_at",
    "device_name",
    "find_boundary",
    "fits",
    "follow",
    "input_part",
    "is_watched",
    "joined",
    "kind_of",
    "make_stages",
    "measure",
    "network_partitions",
    "operations_behind",
    "own_forward",
    "place_now",
    "place_of",
    "plain",
    "slices",
    "unwatch",
    "views_of_inputs",
    "watch",
    "why_whole",
    "with_room_for",
]
