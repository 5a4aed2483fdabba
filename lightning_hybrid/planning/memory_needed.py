"""What a network holds while it trains, on each device and at most."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.search import PlanSettings
from lightning_hybrid.schedules import SCHEDULES, STREAMED, Kind, Schedule

DRIVER_BYTES, WORKER_BYTES = 96 * 2**20, 56 * 2**20
"""What a process takes beside tensors once it was asked what it may take: for TorchDynamo, code of
stages, process groups, messages. As measured with a network of next to nothing on CPUs."""

_TENSORS: dict[str, Callable[[dict[str, Any]], int]] = {
    "SGD": lambda o: int(o["momentum"] != 0),
    "Adam": lambda o: 2 + o["amsgrad"],  # also AdamW, which is one
    "Adamax": lambda o: 2,
    "NAdam": lambda o: 2,
    "RAdam": lambda o: 2,
    "Adadelta": lambda o: 2,
    "Adagrad": lambda o: 1,
    "Adafactor": lambda o: 0,  # a row and a column
    "ASGD": lambda o: 1,
    "RMSprop": lambda o: 1 + (o["momentum"] > 0) + o["centered"],
    "Rprop": lambda o: 2,
    "Muon": lambda o: 1,
}
"""Tensors of a parameter's size that torch's optimizers keep for it."""
ASSUMED_TENSORS = 2
"""The same for all others, as for Adam."""


def optimizer_bytes(
    network: nn.Module, optimizers: Iterable[Optimizer], sharers: int = 1
) -> dict[str, int]:
    """State that optimizers will keep, in bytes by name of the network's parameters.

    Nothing runs: before the first step there is no state to look at.

    Args:
        network: that they train.
        optimizers: the user's.
        sharers: replicas that divide it, parameter by parameter; each is taken to get an equal
            part.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    sizes: dict[str, int] = {}
    for optimizer in optimizers:
        # subclasses keep what their base keeps
        kinds = [kind.__name__ for kind in type(optimizer).__mro__]
        known = next((_TENSORS[kind] for kind in kinds if kind in _TENSORS), None)
        for group in optimizer.param_groups:
            count = known(group) if known else ASSUMED_TENSORS
            for parameter in group["params"]:
                if id(parameter) in names:
                    sizes[names[id(parameter)]] = -(-count * parameter.nbytes // sharers)
    return sizes


def in_flight(schedule: Schedule) -> int:
    """The most micro-batches that any stage has taken forward and not yet backward."""
    most = 0
    for forward, backward in zip(schedule.forward, schedule.backward):
        held = 0
        # a split backward frees activations only with its weight part
        split = any(instruction.kind is Kind.WEIGHT for instruction in backward)
        last = Kind.WEIGHT if split else Kind.BACKWARD
        for instruction in (*forward, *backward):
            held += (instruction.kind is Kind.FORWARD) - (instruction.kind is last)
            most = max(most, held)
    return most


@dataclass(frozen=True)
class Held:
    """What devices hold of a network.

    Attributes:
        needed: bytes per partition; empty: not known.
        most: passes of which a partition holds the activations at once.
        kept_inputs: bytes of inputs of stages that a device keeps beside.
    """

    needed: Sequence[int]
    most: int = 1
    kept_inputs: int = 0

    def room(self, limits: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """What devices with these limits may take beside the inputs that they keep."""
        return limits and tuple(max(0, limit - self.kept_inputs) for limit in limits)


def held_in_training(
    table: PartitionTable, settings: PlanSettings, stages: int, microbatches: int, recompute: bool
) -> Held:
    """What each partition holds while a network trains.

    Args:
        table: of its partitions.
        settings: what the user has asked for.
        stages: number of devices of a replica.
        microbatches: their number.
        recompute: whether stages run their forward again for the backward.
    """
    widest = round(max(table.cut_bytes, default=0))
    streamed = STREAMED.get(settings.schedule)
    name = settings.schedule if streamed else "gpipe"  # that of all exact schedules is the same
    # one stage goes backward with each micro-batch before it begins with the next
    most = 1 if stages == 1 else in_flight(SCHEDULES[name](2, microbatches))
    kept_inputs = copies = 0  # copies of the weights of a stage
    if recompute:
        most, kept_inputs = 1, most * widest
    if streamed is not None:
        ahead = streamed.look_aheads(stages)[0]  # of the first stage, which has the most
        weights = settings.delayed_weights if streamed.delayed else None
        if weights == "recompute":
            kept_inputs = ahead * widest
        else:
            most *= 1 + ahead
        copies = ahead if weights == "stash" else 0
    sizes = zip(table.kept_bytes, table.activation_bytes, table.gradient_bytes)
    needed = [round(kept + most * each + copies * weights) for kept, each, weights in sizes]
    return Held(needed, most, kept_inputs)


def remaining(limits: Sequence[int] | None, beside: Iterable[Plan]) -> tuple[int, ...] | None:
    """What devices may still take beside networks that are placed on them already.

    Args:
        limits: (m,) bytes of each device of a replica; None: not known.
        beside: plans of those networks.
    """
    if limits is None:
        return None
    left = list(limits)
    for plan in beside:
        # recomputation keeps the inputs of its stages, which the rows do not count
        kept_inputs = plan.microbatches * max((row.cut_bytes or 0 for row in plan.rows), default=0)
        for devices, row in zip(plan.owners, plan.rows):
            for device in devices:
                left[device] -= row.memory_bytes or 0
                left[device] -= kept_inputs if plan.recompute else 0
    return tuple(max(0, size) for size in left)


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
    # all copies of a stage take what the first one takes
    devices = plan.first_devices
    steps, passing = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    # the driver, device 0, has the batch and the outputs beside its stages
    steps[0] = life.batch_bytes
    # no cut leads to stage 0: its inputs are the batch, which the driver has
    inputs = [0, *(row.cut_bytes or 0 for row in rows[:-1])]
    for row, taken in zip(rows, inputs):
        crossing = plan.microbatches * (row.cut_bytes or 0) + 2 * max(taken, row.cut_bytes or 0)
        again = plan.microbatches * taken if plan.recompute else 0
        steps[row.device] += (row.memory_bytes or 0) + crossing + again
        sizes = (life.passing_bytes.get(name, 0) for name in row.partitions)
        # operations run one at a time, so of these the largest counts and not the sum
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
