"""What the partitions of a network cost: counted for devices on paper, or measured on this one."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.errors import PlanError
from lightning_hybrid.network import (
    FAILS,
    Capture,
    NetworkGraph,
    NetworkPartition,
    NotCaptured,
    cached,
    clock_of,
    count,
    measure,
    own_forward,
)
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.shapes import CostsOf


class _Seen(Exception):
    """Leaves the call once its graph is captured, so that nothing is computed."""


def capture_call(
    network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[NetworkGraph, list[Tensor]]:
    """The graph of a call of a network, and the tensors that the call brings.

    Nothing is computed: modules and tensors may be on the `meta` device.

    Raises:
        PlanError: the network cannot be captured as one graph, or computes nothing.
    """
    found: list[tuple[NetworkGraph, list[Tensor]]] = []

    def note(graph: NetworkGraph, values: Sequence[Any]) -> Sequence[Any]:
        found.append((graph, graph.bind(values)))
        raise _Seen

    try:
        Capture(network, own_forward(network), note)(tuple(args), dict(kwargs))
    except _Seen:
        return found[0]
    except NotCaptured as error:
        raise PlanError(_refusal(type(network).__name__, error.reason)) from error
    raise PlanError(f"the call of {type(network).__name__} computes nothing with tensors")


def _refusal(name: str, reason: str) -> str:
    """In one line why a call was not captured: its own error, or what is in the way."""
    if reason.startswith(FAILS):
        return f"{name} cannot be called with these inputs: {reason.removeprefix(FAILS)}"
    return (
        f"{name} cannot be captured as one graph: {reason}. "
        "Name a part of it that can be, or train with sizes given: it may still run as a chain of "
        "graphs"
    )


def counted_parts(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    flops_per_s: float,
    state_bytes: Mapping[str, int],
    *,
    divides_states: bool = False,
) -> CostsOf:
    """Costs from counted operations at a given rate; nothing runs.

    Times and sizes are taken to be proportional to the size of a micro-batch, and a backward to be
    two forwards. The optimizer step is not counted.

    Args:
        graph: of the network.
        partitions: of the graph.
        flops_per_s: of the device.
        state_bytes: what the optimizer will keep, by name of parameter.
        divides_states: whether replicas divide it.
    """
    profile = count(graph, partitions).with_optimizer(partitions, state_bytes)

    @cache
    def costs_of(samples: int) -> PartitionTable:
        scale = samples / profile.batch
        return PartitionTable.of(
            *(graph, partitions, profile),
            share=scale,
            seconds=1 / flops_per_s,
            divides_states=divides_states,
        )

    return costs_of


def measured_parts(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    device: torch.device,
    optimizer: Optimizer,
    state_bytes: Mapping[str, int],
    advance: Callable[[int, int], None] | None = None,
    *,
    divides_states: bool = False,
) -> CostsOf:
    """Costs measured on this device, at each size of the micro-batch that is asked for.

    Args:
        graph: of the network.
        partitions: of the graph.
        leaves: the tensors of `NetworkGraph.bind` for a whole batch.
        device: where to measure.
        optimizer: of the network's parameters; a step of it is timed.
        state_bytes: what it keeps, by name of parameter.
        advance: hears which partition is measured, from 1, and how many there are.
        divides_states: whether replicas divide the state.
    """
    batch = graph.batch_of(leaves) or 1
    rate_s = _step_s_per_element(optimizer, device)

    @cache
    def costs_of(samples: int) -> PartitionTable:
        mine = graph.split(leaves, batch // samples)[0]
        profile = cached(
            lambda: measure(graph, partitions, mine, device=device, advance=advance),
            graph,
            partitions,
            mine,
            device,
        ).with_optimizer(partitions, state_bytes)
        table = PartitionTable.of(graph, partitions, profile, divides_states=divides_states)
        return replace(table, step_s=[rate_s * size for size in table.parameters])

    return costs_of


def _step_s_per_element(optimizer: Optimizer, device: torch.device) -> float:
    """Seconds of an optimizer step for one element of a parameter; the parameters do not change."""
    clock = clock_of(device)
    groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group]
    elements: int = sum(p.numel() for p in parameters)
    if not elements:
        return 0.0
    kept = [p.detach().clone() for p in parameters]
    times: list[float] = []
    for _ in range(4):  # the first one makes the state
        for p in parameters:
            p.grad = torch.zeros_like(p)
        start = clock()
        optimizer.step()
        times.append(clock() - start)
    with torch.no_grad():
        for p, value in zip(parameters, kept):
            p.copy_(value)  # weight decay
            p.grad = None
    return statistics.median(times[1:]) / elements
