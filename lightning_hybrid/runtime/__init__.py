"""One replica at work: the driver, its workers, their networks, weights and optimizers."""

from lightning_hybrid.runtime.after_run import bring_here
from lightning_hybrid.runtime.background import Background
from lightning_hybrid.runtime.deferred_weights import (
    Unfilled,
    gather_after_run,
    gather_optimizer_after_run,
    make_what_no_network_owns,
    outline,
    whole,
)
from lightning_hybrid.runtime.discovery import Discovery
from lightning_hybrid.runtime.driver import Driver
from lightning_hybrid.runtime.look_ahead import LookAhead, Seen
from lightning_hybrid.runtime.mapped_checkpoint import let_go_of_checkpoints, remember_mapped
from lightning_hybrid.runtime.network_options import NetworkOptions, Planner
from lightning_hybrid.runtime.optimizer_state import were_divided
from lightning_hybrid.runtime.sharded_checkpoint import (
    LAST_S,
    is_sharded,
    read_sharded,
    save_alone,
)
from lightning_hybrid.runtime.streamed_calls import Batches
from lightning_hybrid.runtime.tensor_file import PIECE_BYTES, let_go, may_be_mapped
from lightning_hybrid.runtime.unread_checkpoint import load_unread
from lightning_hybrid.runtime.weights import present_bytes
from lightning_hybrid.runtime.worker import Worker

__all__ = [
    "LAST_S",
    "PIECE_BYTES",
    "Background",
    "Batches",
    "Discovery",
    "Driver",
    "LookAhead",
    "NetworkOptions",
    "Planner",
    "Seen",
    "Unfilled",
    "Worker",
    "bring_here",
    "gather_after_run",
    "gather_optimizer_after_run",
    "is_sharded",
    "let_go",
    "let_go_of_checkpoints",
    "load_unread",
    "make_what_no_network_owns",
    "may_be_mapped",
    "outline",
    "present_bytes",
    "read_sharded",
    "remember_mapped",
    "save_alone",
    "were_divided",
    "whole",
]
