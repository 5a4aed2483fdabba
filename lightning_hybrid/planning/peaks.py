"""The most memory that each rank of a plan takes from the start of a run to its end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_hybrid.planning.plan import Plan

DRIVER_BYTES, WORKER_BYTES = 96 * 2**20, 56 * 2**20
"""What a process takes beside tensors once it was asked what it may take: for TorchDynamo, code of
stages, process groups, messages. As measured with a network of next to nothing on CPUs."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """What ranks hold in a run beside the activations of their stages.

    Attributes:
        start_bytes: before the cut: a network that is built in ``__init__`` is whole on each rank.
        passing_bytes: by name of the partition: the most that is there for a moment, for an
            operation, or beside its largest parameter.
        batch_bytes: on the driver: inputs and outputs of all micro-batches, and their gradients.
        on_cpu: whether processes and tensors share their memory.
    """

    start_bytes: int
    passing_bytes: Mapping[str, int]
    batch_bytes: int
    on_cpu: bool = True


def with_peaks(plan: Plan, life: Life, limits: tuple[int, ...] | None) -> Plan:
    """A plan whose rows say what the rank of each stage takes at most, and what it may take.

    Steps hold the stages, what crosses their cuts (of each micro-batch what was sent until it has
    come back, two gradients on their way), and, where activations are computed again, the inputs
    of all micro-batches. For a moment there is more: what operations take for themselves, or once
    more the largest parameter (a gradient that is added to another one, or what an optimizer
    divides by), whichever is more. A checkpoint and the end of a run hold no more: what is kept,
    and a piece of a file, which is one tensor at most.

    Args:
        plan: of one network.
        life: what ranks hold beside.
        limits: bytes that each device may take; None: not known.
    """
    rows = plan.rows
    if any(row.memory_bytes is None for row in rows):
        return plan
    steps, passing = dict.fromkeys(plan.devices, 0), dict.fromkeys(plan.devices, 0)
    steps[0] = life.batch_bytes
    inputs = [0, *(row.cut_bytes or 0 for row in rows[:-1])]
    for row, taken in zip(rows, inputs):
        crossing = plan.microbatches * (row.cut_bytes or 0) + 2 * max(taken, row.cut_bytes or 0)
        again = plan.microbatches * taken if plan.recompute else 0
        steps[row.device] += (row.memory_bytes or 0) + crossing + again
        sizes = (life.passing_bytes.get(name, 0) for name in row.partitions)
        passing[row.device] = max(passing[row.device], *sizes)
    peaks = {
        device: max(life.start_bytes, steps[device] + passing[device])
        + (DRIVER_BYTES if device == 0 else WORKER_BYTES) * life.on_cpu
        for device in plan.devices
    }
    return replace(
        plan,
        rows=tuple(
            replace(
                row,
                peak_bytes=peaks[row.device],
                limit_bytes=None if limits is None else limits[row.device],
            )
            for row in rows
        ),
    )
