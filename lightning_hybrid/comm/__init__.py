"""Communication of ranks: process groups, channels for commands, links for activations."""

from lightning_hybrid.comm.activation_links import (
    Arriving,
    Devices,
    LinksByMicrobatch,
    StageLinks,
    connect,
    copies_of,
    link_copies,
    stages_of,
)
from lightning_hybrid.comm.call_precision import CallPrecision
from lightning_hybrid.comm.collectives import (
    agree,
    broadcast_object,
    fail_next_meeting,
    gather_objects,
    meet,
)
from lightning_hybrid.comm.connections import (
    ANOTHER_REPLICA,
    SENDS,
    UNKNOWN_PEER,
    ConnectionLost,
    Group,
    GroupHandle,
    GroupWire,
    connection_lost,
    start,
    wait,
)
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.heartbeat import Heartbeat
from lightning_hybrid.comm.link_probe import (
    LARGE_BYTES,
    PairProbe,
    Spread,
    probe_all_reduce,
    probe_flops,
    probe_pair,
)
from lightning_hybrid.comm.mesh import Mesh, backend_on, make_world
from lightning_hybrid.comm.nccl_guard import NcclGuard
from lightning_hybrid.comm.network_interface import bound_to, choose_interface, chosen_interface
from lightning_hybrid.comm.protocol import Answer, GradientPattern, Header, Status, Tensors
from lightning_hybrid.comm.signals import (
    make_deferrable,
    restore_handlers,
    run_pending,
    signals_deferred,
    signals_ignored,
)
from lightning_hybrid.comm.survivors import FAULT, Survivors
from lightning_hybrid.comm.switches import set_switches, switches
from lightning_hybrid.comm.tensor_specs import (
    CallKey,
    Inside,
    TensorSpec,
    bytes_of,
)
from lightning_hybrid.comm.threads import BackgroundThread, end_process
from lightning_hybrid.comm.travelling_errors import Failure, is_gone, is_late, raised, told_text
