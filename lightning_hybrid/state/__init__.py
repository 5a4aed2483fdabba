"""Weights and the states of optimizers, as each rank has them and in files."""

from lightning_hybrid.state.clipping_and_loss_scale import (
    gradient_norms,
    gradients_of,
    parameters_of,
    total_norm,
    unscale,
)
from lightning_hybrid.state.deferred_weights import (
    having_all,
    leave_to_worker,
    make_here,
    make_what_no_network_owns,
    optimizer_after_run,
    to_send,
    without_frozen,
)
from lightning_hybrid.state.divided_optimizer_states import (
    OtherReplicas,
    ReplicaOfState,
    StatesByName,
    StateShares,
    gather_states,
    outlined,
)
from lightning_hybrid.state.optimizer_state import FetchedStates, placed, were_divided
from lightning_hybrid.state.optimizers import (
    NamedGroups,
    complete,
    groups_of,
    plain_attributes,
    same,
    ship,
    take_groups,
    unship,
)
from lightning_hybrid.state.safetensors_folder import write_safetensors
from lightning_hybrid.state.sharded_checkpoint import (
    LAST_S,
    DividedCheckpoint,
    Key,
    Shard,
    TensorAddress,
    await_shard,
    finish,
    is_sharded,
    leave_shard,
    save_alone,
    staged,
    unread_there,
    write_rest,
    write_shard,
)
from lightning_hybrid.state.sharded_save_order import Background, ShardedSaves
from lightning_hybrid.state.tensor_file import (
    FilesOfWorker,
    NoRoom,
    let_go_of_checkpoints,
    put_mapped,
    read_files,
    received,
)
from lightning_hybrid.state.whole_checkpoint import load_checkpoint, save_checkpoint
