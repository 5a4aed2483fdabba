"""Predict the memory that a network takes in training: per partition, and the peak per rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.planning.memory_check import ChainSizes, TrainingMemory
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.search import PlanSettings
from lightning_hybrid.schedules import INSIDE, STREAMED, most_in_loops

DRIVER_BYTES, WORKER_BYTES = 96 * 2**20, 56 * 2**20
"""Bytes that a driver's and a worker's process take beside tensors, after the free memory was read:
for TorchDynamo, code of stages, process groups, messages. Measured with a tiny network on CPUs."""


def held_in_training(
    table: PartitionTable, settings: PlanSettings, way: ChainSizes
) -> TrainingMemory:
    """Predict the memory that each partition holds in training.

    Args:
        table: the partitions, with their sizes.
        settings: options of the user.
        way: numbers of stages and micro-batches, and whether activations are recomputed. Whether
            backwards run inside of calls is taken from the schedule in `settings`.
    """
    widest = round(max(table.cut_bytes, default=0))
    streamed = STREAMED.get(settings.schedule)
    # all micro-batches of a batch go forward before the first one goes backward; but a single stage
    # runs the backward of each before the next one's forward
    most = 1 if way.stages == 1 else way.microbatches
    # backwards inside of a call keep a second set of gradients, until the loss has its gradient
    aside = 0
    if settings.schedule == INSIDE and way.stages > 1:
        most, aside = min(way.stages, way.microbatches), 1
        # in a loop the first device begins with more micro-batches: see `interleaved`
        if not settings.contiguous:
            most = min(most_in_loops(way.stages, way.microbatches), way.microbatches)
    kept_inputs = copies = 0  # number of copies of a stage's weights
    if way.recompute:
        most, kept_inputs = 1, most * widest
    if streamed is not None:
        ahead = streamed.look_aheads(way.stages)[0]  # the first stage's is the largest
        weights = settings.delayed_weights if streamed.delayed else None
        if weights == "recompute":
            kept_inputs = ahead * widest
        else:
            most *= 1 + ahead
        copies = ahead if weights == "stash" else 0
    sizes = zip(table.kept_bytes, table.activation_bytes, table.gradient_bytes)
    needed = [
        round(kept + most * each + (copies + aside) * weights) for kept, each, weights in sizes
    ]
    return TrainingMemory(needed, most, kept_inputs)


def remaining(limits: Sequence[int] | None, beside: Iterable[Plan]) -> tuple[int, ...] | None:
    """Subtract the memory of networks that are placed already from that of the devices.

    Args:
        limits: (m,) bytes that each device of a replica may use; None: not known.
        beside: plans of the networks that are placed already.

    Returns:
        (m,) bytes left on each device, 0 at least; None: `limits` is None.
    """
    if limits is None:
        return None
    left = list(limits)
    for plan in beside:
        # with recomputation devices keep inputs of stages too, which are not in the rows
        kept_inputs = plan.microbatches * max((row.cut_bytes or 0 for row in plan.rows), default=0)
        for devices, row in zip(plan.owners, plan.rows):
            for device in devices:
                left[device] -= row.memory_bytes or 0
                left[device] -= kept_inputs if plan.recompute else 0
    return tuple(max(0, size) for size in left)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Memory that ranks take in a run beside that of their stages.

    Attributes:
        start_bytes: bytes on each rank before the network is cut: a network that is built in
            ``__init__`` is then whole on each rank.
        passing_bytes: by name of the partition, the most bytes that it uses for a moment: for an
            operation, or for another tensor of the size of its largest parameter.
        batch_bytes: bytes on the driver for inputs and outputs of all micro-batches, and their
            gradients.
        on_cpu: whether stages are on CPUs, so that tensors and the process share the memory.
    """

    start_bytes: int
    passing_bytes: Mapping[str, int]
    batch_bytes: int
    on_cpu: bool = True


def with_peaks(plan: Plan, life: RunMemory, limits: tuple[int, ...] | None) -> Plan:
    """Make a copy of a plan whose rows have the peak and the limit of memory of each stage's rank.

    A step holds the stages; tensors that cross their cuts (those sent of all micro-batches, and two
    gradients in transfer); and with recomputation the inputs of all micro-batches. For a moment
    there is more: memory that operations use, or another tensor of the size of the largest
    parameter (a gradient that is added to another one, or an optimizer's divisor), whichever is
    more. Checkpoints and the end of a run take no more than that: beside what is kept, one tensor
    at most.

    Args:
        plan: plan of one network; without predicted memory (`memory_bytes` of its rows) it is
            returned as it is.
        life: memory that ranks take beside their stages.
        limits: bytes that each device of a replica may use, by its index; None: not known.
    """
    rows = plan.rows
    if any(row.memory_bytes is None for row in rows):
        return plan
    # the copies of a stage take equal memory: the first one stands for all
    devices = plan.first_devices
    steps, passing = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    # the driver, device 0, has the batch and the outputs beside its stages
    steps[0] = life.batch_bytes
    # stage 0 has no cut in front of it: its inputs are the batch, counted on the driver
    inputs = [0, *(row.cut_bytes or 0 for row in rows[:-1])]
    for row, taken in zip(rows, inputs):
        sent = plan.microbatches if plan.schedule != INSIDE else min(plan.stages, plan.microbatches)
        crossing = sent * (row.cut_bytes or 0) + 2 * max(taken, row.cut_bytes or 0)
        again = sent * taken if plan.recompute else 0
        steps[row.device] += (row.memory_bytes or 0) + crossing + again
        sizes = (life.passing_bytes.get(name, 0) for name in row.partitions)
        # operations run one at a time, so the largest counts and not the sum
        passing[row.device] = max(passing[row.device], *sizes)
    peaks = {
        device: max(life.start_bytes, steps[device] + passing[device])
        + (DRIVER_BYTES if device == 0 else WORKER_BYTES) * life.on_cpu
        for device in devices
    }
    return replace(
        plan,
        rows=tuple(
            replace(
                row,
                peak_bytes=peaks[row.device],
                limit_bytes=None if limits is None else min(limits[k] for k in copies),
            )
            for row, copies in zip(rows, plan.owners)
        ),
    )
