"""Tensors whose numbers are on other ranks, in files or not made yet: proxies, deferred tensors."""

from lightning_hybrid.remote.deferred import (
    count_as_whole,
    empty_like_on,
    give_up,
    is_deferred,
    is_lent,
    is_of_one_rank,
    is_offloaded,
    is_vacant,
    lend,
    materialize,
    materialized_with,
    occupy,
    offload,
    refuse_lost,
    show,
    take_back,
    vacate,
    value_of,
)
from lightning_hybrid.remote.deferred_maker import (
    DeferredMaker,
    file_parts,
    forget_made,
    has_source,
)
from lightning_hybrid.remote.hollow_network import Hollow, NoMemory, watched
from lightning_hybrid.remote.intercepted import Intercepted
from lightning_hybrid.remote.living_views import ViewInMemory, views_of
from lightning_hybrid.remote.mapped_files import (
    PAGE_OUT,
    FileOfTensors,
    FilePart,
    let_go_of_pages,
    mappings,
)
from lightning_hybrid.remote.own_memory import with_memory
from lightning_hybrid.remote.proxies import Proxies
from lightning_hybrid.remote.proxy import RemoteKind, read_now, writes_to
from lightning_hybrid.remote.remote_gradients import RemoteGradients
from lightning_hybrid.remote.unread import (
    Unread,
    is_unread,
    leave_unread,
    left_unread,
    streaming,
    unread,
    unread_place_of,
)
