"""Tensors that are not here, or not yet: proxies of what other ranks own, weights made later."""

from lightning_hybrid.tensors.deferral import Deferral, has_loaded
from lightning_hybrid.tensors.deferred import (
    is_deferred,
    is_of_one_rank,
    is_offloaded,
    materialize,
    materialize_here,
    materialized,
    materialized_with,
    offload,
    value_of,
)
from lightning_hybrid.tensors.emptied_tensors import NoMemory, watched
from lightning_hybrid.tensors.hollow_network import Hollow
from lightning_hybrid.tensors.intercepted import Intercepted
from lightning_hybrid.tensors.living_views import View, views_of
from lightning_hybrid.tensors.proxy import hook_refused, read_now
from lightning_hybrid.tensors.remote import RemoteTensors
from lightning_hybrid.tensors.remote_kind import Kind
from lightning_hybrid.tensors.unread import (
    Unread,
    is_unread,
    leave_unread,
    left_unread,
    place_of,
    streaming,
    unread,
)
from lightning_hybrid.tensors.vacant import give_up, is_vacant, occupy, vacate

__all__ = [
    "Deferral",
    "Hollow",
    "Intercepted",
    "Kind",
    "NoMemory",
    "RemoteTensors",
    "Unread",
    "View",
    "give_up",
    "has_loaded",
    "hook_refused",
    "is_deferred",
    "is_of_one_rank",
    "is_offloaded",
    "is_unread",
    "is_vacant",
    "leave_unread",
    "left_unread",
    "materialize",
    "materialize_here",
    "materialized",
    "materialized_with",
    "occupy",
    "offload",
    "place_of",
    "read_now",
    "streaming",
    "unread",
    "vacate",
    "value_of",
    "views_of",
    "watched",
]
