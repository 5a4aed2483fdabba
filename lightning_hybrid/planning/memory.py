"""What a network holds while it trains, and whether the devices can take it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.errors import PlanError
from lightning_hybrid.network import PartitionProfile, Profile
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


def optimizer_bytes(network: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """State that optimizers will keep, in bytes by name of the network's parameters.

    Nothing runs: before the first step there is no state to look at.
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
                    sizes[names[id(parameter)]] = count * parameter.nbytes
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
) -> None:
    """Complain if no placement can hold the network.

    Args:
        profile: of its partitions.
        needed: bytes that each of them holds.
        limits: bytes that each device of a replica may take, by its index.
        held: micro-batches whose activations are held at once.
        recompute: whether activations are computed again.

    Raises:
        PlanError: one partition is larger than any device, or all are larger than all devices.
    """
    again = ", with recompute=True," if recompute else ""
    free = "free beside the inputs that its stages keep" if recompute else "free"
    largest = max(range(len(needed)), key=needed.__getitem__)
    roomiest = max(range(len(limits)), key=limits.__getitem__)
    advice = (
        "Make the batch smaller (activations grow with it), take an optimizer with less state, or "
        "use larger devices{more}."
    )
    if held > 1:
        less = sum(p.memory_bytes(1) for p in profile.partitions)
        advice += f" recompute=True holds activations of one micro-batch: {_gb(less)} in all."
    if needed[largest] > limits[roomiest]:
        raise PlanError(
            f"network partition {profile.partitions[largest].name!r} needs{again} "
            f"{_spelled([profile.partitions[largest]], held)}, more than any device has: "
            f"the largest, device {roomiest} of a replica, has {_gb(limits[roomiest])} {free}. "
            + advice.format(more="")
        )
    if sum(needed) > sum(limits):
        each = ", ".join(map(_gb, limits))
        raise PlanError(
            f"the network needs{again} {_spelled(profile.partitions, held)}, more than the "
            f"{len(limits)} devices of a replica have {free} together: {_gb(sum(limits))} "
            f"({each}). " + advice.format(more=", or more stages (pipeline_parallel_size)")
        )


def _spelled(partitions: Sequence[PartitionProfile], held: int) -> str:
    def total(name: str) -> str:
        return _gb(sum(getattr(p, f"{name}_bytes") for p in partitions))

    return (
        f"{_gb(sum(p.memory_bytes(held) for p in partitions))} (parameters "
        f"{total('parameter')}, gradients {total('gradient')}, optimizer {total('optimizer')}, "
        f"activations {total('activation')} for each of {held} micro-batches held)"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
