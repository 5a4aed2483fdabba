"""What the partitions of a network cost: counted for devices on paper, or measured on this one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.asking.step_problems import CostsOf
from lightning_hybrid.capture import Capture, NotCaptured, own_forward
from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import FAILS, NetworkGraph, NetworkPartition, count
from lightning_hybrid.planning import CalledNetwork, PartitionTable, update_s_per_byte


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
        # the exception of `note` is the way out, before anything is computed
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
        # counted operations grow with the samples
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
    state_bytes: Mapping[str, int],
    advance: Callable[[int, int], None] | None = None,
    *,
    divides_states: bool = False,
) -> CostsOf:
    """Costs measured on this device, at each size of the micro-batch that is asked for.

    The optimizer step is taken to be one of average cost, as for the sizes of a run.

    Args:
        graph: of the network.
        partitions: of the graph.
        leaves: the tensors of `NetworkGraph.bind` for a whole batch.
        device: where to measure.
        state_bytes: what the optimizer will keep, by name of parameter.
        advance: hears which partition is measured, from 1, and how many there are.
        divides_states: whether replicas divide the state.
    """
    batch = graph.batch_of(leaves) or 1
    rate_s = update_s_per_byte(device)

    @cache
    def costs_of(samples: int) -> PartitionTable:
        mine = graph.split(leaves, batch // samples)[0]
        called = CalledNetwork(name="", graph=graph, partitions=partitions, leaves=mine)
        table = called.table(device, state_bytes, advance, divides_states=divides_states)
        return replace(table, step_s=[rate_s * size for size in table.gradient_bytes])

    return costs_of
