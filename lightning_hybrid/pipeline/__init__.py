"""The stages of one rank at work: forward and backward, random numbers, averaged gradients."""

from lightning_hybrid.pipeline.batchnorm import Synchronised
from lightning_hybrid.pipeline.broadcasts import Broadcasts
from lightning_hybrid.pipeline.busy_time import Stopwatch, bubble, serial_s
from lightning_hybrid.pipeline.calls import Call, Gradients, Values
from lightning_hybrid.pipeline.engine import Engine
from lightning_hybrid.pipeline.gradient_averaging import (
    ReplicaGroup,
    broadcast_module,
    state_buffers,
)
from lightning_hybrid.pipeline.random_numbers import (
    draw_number,
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    set_random_state,
)
from lightning_hybrid.pipeline.stage_options import StageOptions
from lightning_hybrid.pipeline.staged_network import (
    StagedNetwork,
    borrowed_parameters,
    names_of,
    own_buffers,
    own_parameters,
    tensors_of,
    write_tensors,
)
from lightning_hybrid.pipeline.trace import Trace
from lightning_hybrid.pipeline.weight_hooks import is_of_the_user

__all__ = [
    "Broadcasts",
    "Call",
    "Engine",
    "Gradients",
    "ReplicaGroup",
    "StageOptions",
    "StagedNetwork",
    "Stopwatch",
    "Synchronised",
    "Trace",
    "Values",
    "borrowed_parameters",
    "broadcast_module",
    "bubble",
    "draw_number",
    "generators_of_microbatch",
    "is_of_the_user",
    "microbatch_seed",
    "names_of",
    "own_buffers",
    "own_parameters",
    "random_state",
    "serial_s",
    "set_random_state",
    "state_buffers",
    "tensors_of",
    "write_tensors",
]
