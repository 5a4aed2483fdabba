"""A captured network as data: where its tensors hold samples, partitions, cuts, code of stages."""

from lightning_hybrid.graph.cut_stages import (
    Stage,
    StageCode,
    collecting,
    compiled,
    compute_whole,
    cut,
    cut_at,
    make_stages,
)
from lightning_hybrid.graph.cuts_and_crossings import Cuts
from lightning_hybrid.graph.graph import (
    Leaf,
    NetworkGraph,
    fits,
    joined,
    reached,
    slices,
    why_whole,
)
from lightning_hybrid.graph.graph_from_dynamo import describe
from lightning_hybrid.graph.loss_terms import LossOfCall
from lightning_hybrid.graph.partition import (
    CannotFollow,
    NetworkPartition,
    cuts_for_owned,
    find_boundary,
    network_partitions,
)
from lightning_hybrid.graph.recurrent_layers import FREE_SEQUENCES
from lightning_hybrid.graph.rows import Rows
from lightning_hybrid.graph.source_places import is_users_file, place_now
from lightning_hybrid.graph.stage_code import held_by
from lightning_hybrid.graph.three_parts import Divided, is_running_statistic
