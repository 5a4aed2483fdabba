"""How a rank runs its stages: passes, random numbers, batch statistics, averaging of gradients."""

from lightning_hybrid.stage.calls import Call, Ends, Gradients, Values
from lightning_hybrid.stage.engine import Engine
from lightning_hybrid.stage.gradient_averaging import (
    AveragingGroup,
    Broadcasts,
    broadcast_module,
    state_buffers,
)
from lightning_hybrid.stage.lending_line import LendingLine
from lightning_hybrid.stage.module_outline import ModuleOutline
from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    seed_number_of,
    set_random_state,
)
from lightning_hybrid.stage.rank_stages import (
    StageOptions,
    borrowed_parameters,
    lent_parameters,
)
from lightning_hybrid.stage.split_backward import input_part
from lightning_hybrid.stage.stage_check import (
    check,
    copy_to_measure,
    fresh,
    stays_on_cpu,
    with_room_for,
    with_saved,
)
from lightning_hybrid.stage.staged_network import (
    StagedNetwork,
    names_of,
    tensors_of,
    write_tensors,
)
from lightning_hybrid.stage.synchronised_batchnorm import Synchronised
from lightning_hybrid.stage.trace import Stopwatch, Trace, bubble, serial_s
