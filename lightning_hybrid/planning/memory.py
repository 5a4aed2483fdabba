"""What a network holds while it trains, and whether the devices can take it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.errors import PlanError
from lightning_hybrid.network import PartitionProfile, Profile
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.would_fit import Fit, gigabytes, what_would_fit
from lightning_hybrid.schedules import Kind, Schedule

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
        split = any(instruction.kind is Kind.WEIGHT for instruction in backward)
        last = Kind.WEIGHT if split else Kind.BACKWARD
        for instruction in (*forward, *backward):
            held += (instruction.kind is Kind.FORWARD) - (instruction.kind is last)
            most = max(most, held)
    return most


def check_memory(
    profile: Profile,
    needed: Sequence[int],
    limits: Sequence[int],
    held: int,
    *,
    recompute: bool = False,
    tried: Sequence[Fit] = (),
    contiguous: bool = False,
) -> None:
    """Complain if no placement can hold the network.

    Args:
        profile: of its partitions.
        needed: bytes that each of them holds.
        limits: bytes that each device of a replica may take, by its index.
        held: micro-batches whose activations are held at once.
        recompute: whether activations are computed again.
        tried: this way of spreading it, and others that are no alternative.
        contiguous: whether each device gets one run of partitions, so that the first of `tried`
            is the only placement.

    Raises:
        PlanError: one partition is larger than any device, or all are larger than all devices, or
            no chain fits; the text says what is missing where, and what would fit.
    """
    again = ", with recompute=True," if recompute else ""
    free = "free beside the inputs that its stages keep" if recompute else "free"
    largest = max(range(len(needed)), key=needed.__getitem__)
    roomiest = max(range(len(limits)), key=limits.__getitem__)
    more = ""
    if needed[largest] > limits[roomiest]:
        problem = (
            f"network partition {profile.partitions[largest].name!r} needs{again} "
            f"{_spelled([profile.partitions[largest]], held)}, more than any device has: the "
            f"largest, device {roomiest} of a replica, has {gigabytes(limits[roomiest])} {free}"
        )
    elif sum(needed) > sum(limits):
        each = ", ".join(map(gigabytes, limits))
        more = ", or more stages (pipeline_parallel_size)"
        problem = (
            f"the network needs{again} {_spelled(profile.partitions, held)}, more than the "
            f"{len(limits)} devices of a replica have {free} together: {gigabytes(sum(limits))} "
            f"({each})"
        )
    elif contiguous and tried and not tried[0].fits:
        more = ", or more stages (pipeline_parallel_size)"
        problem = f"no chain of stages fits into memory, however it is cut: {tried[0]}"
    else:
        return
    raise PlanError(f"{problem}. {_advice(profile, held, more, tried)}")


def _advice(profile: Profile, held: int, more: str, tried: Sequence[Fit]) -> str:
    texts = [
        "Make the batch smaller (activations grow with it), take an optimizer with less state, or "
        f"use larger devices{more}."
    ]
    if held > 1:
        less = gigabytes(sum(p.memory_bytes(1) for p in profile.partitions))
        texts.append(f"recompute=True holds activations of one micro-batch: {less} in all.")
    if tried:
        texts.append(what_would_fit(tried))
    return " ".join(texts)


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
        kept_inputs = plan.microbatches * max((row.cut_bytes or 0 for row in plan.rows), default=0)
        for device, row in zip(plan.devices, plan.rows):
            left[device] -= row.memory_bytes or 0
            left[device] -= kept_inputs if plan.recompute else 0
    return tuple(max(0, size) for size in left)


def _spelled(partitions: Sequence[PartitionProfile], held: int) -> str:
    def total(name: str) -> str:
        return gigabytes(sum(getattr(p, f"{name}_bytes") for p in partitions))

    buckets = f"{total('bucket')} to average them, " if partitions[0].bucket_bytes else ""
    return (
        f"{gigabytes(sum(p.memory_bytes(held) for p in partitions))} (parameters "
        f"{total('parameter')}, gradients {total('gradient')}, {buckets}"
        f"optimizer {total('optimizer')}, "
        f"activations {total('activation')} for each of {held} micro-batches held)"
    )
