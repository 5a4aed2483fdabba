"""Costs of the partitions of a network: from counted FLOPs, or measured on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.capture import FAILS, Capture, NotCaptured, own_forward
from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import NetworkGraph, NetworkPartition
from lightning_hybrid.planning import CostsOf, PartitionTable
from lightning_hybrid.profiling import (
    CalledNetwork,
    count,
    states_of_partitions,
    update_s_per_byte,
)


class _Seen(Exception):
    """Raised by this module when the graph of a call is captured, so that the call does not run."""


def capture_call(
    network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[NetworkGraph, list[Tensor]]:
    """Capture the graph of a call of a network; nothing is computed.

    So modules and tensors may be on the `meta` device.

    Args:
        network: the network, in the mode (training or not) of the call.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Returns:
        The graph, and the input tensors of the call in the order in which the graph takes them.

    Raises:
        PlanError: the network cannot be captured as one graph, or computes nothing.
    """
    found: list[tuple[NetworkGraph, list[Tensor]]] = []

    def note(graph: NetworkGraph, values: Sequence[Any], *_: object) -> Sequence[Any]:
        found.append((graph, graph.bind(values)))
        raise _Seen

    try:
        # `note` raises when the graph is captured, before anything is computed
        Capture(network, own_forward(network), note, shares=True)(tuple(args), dict(kwargs))
    except _Seen:
        return found[0]
    except NotCaptured as error:
        raise PlanError(_refusal(type(network).__name__, error.reason)) from error
    raise PlanError(f"the call of {type(network).__name__} computes nothing with tensors")


def _refusal(name: str, reason: str) -> str:
    """Make the error text for a call that could not be captured.

    Args:
        name: class of the network.
        reason: why; if it begins with `FAILS`, the call itself has failed.
    """
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
    """Make a function that computes costs of partitions from counted FLOPs; the network never runs.

    It is for `plan` and `simulate` without ``--measure``. Times and sizes are taken to be
    proportional to the size of a micro-batch, and a backward to take as long as two forwards. The
    optimizer step is not counted.

    Args:
        graph: graph of the network, from `capture_call`.
        partitions: all partitions of the graph, in order.
        flops_per_s: FLOP/s of the device.
        state_bytes: bytes of optimizer state, by name of the parameter.
        divides_states: whether replicas divide the optimizer state.

    Returns:
        A function from the number of samples of a micro-batch to the costs of all partitions.
    """
    counted, states = count(graph, partitions), states_of_partitions(partitions, state_bytes)
    counted = counted.with_optimizer(states, divides=divides_states)

    @cache
    def costs_of(samples: int) -> PartitionTable:
        # FLOPs are proportional to the samples
        return counted.scaled(samples / counted.batch, 1 / flops_per_s)

    return costs_of


def measured_parts(
    graph: NetworkGraph,
    partitions: Sequence[NetworkPartition],
    leaves: Sequence[Tensor],
    device: torch.device,
    state_bytes: Mapping[str, int],
    *,
    divides_states: bool = False,
) -> CostsOf:
    """Make a function that measures the costs of partitions by running them on a device.

    It is for `plan` and `simulate` with ``--measure``. The time of the optimizer step is that of a
    typical optimizer (`update_s_per_byte`), which is measured at once.

    Args:
        graph: graph of the network, from `capture_call`.
        partitions: all partitions of the graph, in order.
        leaves: input tensors of a call with a whole batch, as `capture_call` returns them.
        device: device to measure on.
        state_bytes: bytes of optimizer state, by name of the parameter.
        divides_states: whether replicas divide the optimizer state.

    Returns:
        A function from the number of samples of a micro-batch to the costs of all partitions. It
        measures in the first call with each number, or reads the cache of profiles.
    """
    batch = graph.batch_of(leaves) or 1
    rate_s, states = update_s_per_byte(device), states_of_partitions(partitions, state_bytes)

    @cache
    def costs_of(samples: int) -> PartitionTable:
        mine = graph.split(leaves, -(-batch // samples))[0]
        called = CalledNetwork(name="", graph=graph, partitions=partitions, leaves=mine)
        table = called.profile(device)
        table = table.with_optimizer(states, divides=divides_states)
        return replace(table, step_s=[rate_s * size for size in table.gradient_bytes])

    return costs_of
