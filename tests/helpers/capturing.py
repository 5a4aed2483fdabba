"""Capture a network for one call, and compute its calls through stages in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._trees import tensors_in
from lightning_hybrid.capture import Capture
from lightning_hybrid.capture.watched_calls import own_forward
from lightning_hybrid.graph import (
    NetworkGraph,
    NetworkPartition,
    StageCode,
    cut,
    make_stages,
    network_partitions,
    why_whole,
)
from lightning_hybrid.graph.rows import Rows
from lightning_hybrid.remote.hollow_network import Hollow
from lightning_hybrid.stage.stage_check import run

Boundaries = Callable[[Sequence[NetworkPartition]], Sequence[int]]
"""Chooses the partitions that stages begin with."""


def everywhere(partitions: Sequence[NetworkPartition]) -> Sequence[int]:
    """Each partition is a stage."""
    return range(1, len(partitions))


def nowhere(_: Sequence[NetworkPartition]) -> Sequence[int]:
    """One stage."""
    return []


class Staged:
    """A network whose calls are captured, cut, and computed stage after stage.

    Args:
        network: the module.
        boundaries: where to cut.
        divides: whether the driver may compute what needs all samples.

    Attributes:
        graphs: those of all calls so far, each once.
        codes: the stages of each.
        values: arguments of the last call's graph.
    """

    def __init__(
        self, network: nn.Module, boundaries: Boundaries = everywhere, *, divides: bool = False
    ) -> None:
        self.network, self._boundaries = network, boundaries
        self._hollow = Hollow(network, torch.device("cpu"))
        self.capture = Capture(network, own_forward(network), self._run, divides=divides)
        self.graphs: list[NetworkGraph] = []
        self.values: Sequence[Any] = ()
        self.codes: dict[NetworkGraph, list[StageCode]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._hollow:
            return self.capture(args, kwargs)

    def _run(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        if graph not in self.codes:
            self.graphs.append(graph)
            partitions = network_partitions(graph)
            codes = cut(graph, partitions, self._boundaries(partitions))
            self.codes[graph] = pickle.loads(pickle.dumps(codes))
        self.values = values
        with self._hollow.lifted():
            return outputs_of(graph, self.codes[graph], values)


def outputs_of(graph: NetworkGraph, codes: Sequence[StageCode], values: Sequence[Any]) -> list[Any]:
    """What the graph returns, from the arguments of the graph, by its stages."""
    leaves = graph.bind(values)
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    results = run(graph, make_stages(codes, graph.network, graph.device), leaves)
    return graph.returned(results, numbers)


class InParts:
    """A network whose calls are captured, divided, and computed in micro-batches.

    Args:
        network: the module.
        microbatches: into how many a batch is split, where its samples do not meet.
        draws: whether each may draw random numbers by itself; see `Capture`.

    Attributes:
        graph: the heavy part of the last call.
        why_whole: why that call was not split, if it was not.
        division: by what it was, else.
        counted: how many micro-batches it had.
    """

    def __init__(self, network: nn.Module, microbatches: int = 2, *, draws: bool = True) -> None:
        self._microbatches = microbatches
        self.capture = Capture(network, own_forward(network), self._run, draws=draws)
        self.graph: NetworkGraph | None = None
        self.why_whole: str | None = None
        self.division = ""
        self.counted = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.capture(args, kwargs)

    def _run(self, graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        leaves = graph.bind(values)
        self.graph, self.why_whole = graph, why_whole(graph, leaves, self._microbatches)
        self.division = graph.split_by
        split = self._microbatches if self.why_whole is None else 1
        parts = graph.split(leaves, split)
        self.counted = len(parts)
        (code,) = cut(graph, network_partitions(graph), [])
        found = []
        for part in parts:
            numbers = graph.values_of_numbers(graph.sizes(part))
            (stage,) = make_stages([code], graph.network, graph.device)
            found.append(stage(part, numbers))
        numbers = graph.values_of_numbers(graph.sizes(leaves))
        if split == 1:
            return graph.returned(found[0], numbers)
        rows = [graph.rows[node] for node in graph.tensor_outputs]
        rows += [None] * (len(found[0]) - len(rows))
        outputs = [_together(s, r) for s, r in zip(zip(*found), rows)]
        return graph.returned(outputs, numbers)


class InShares:
    """A network whose micro-batches each compute their share of the loss, as one stage.

    Args:
        network: the module.
        microbatches: into how many a batch is split.

    Attributes:
        reason: why they do not.
        shared: how many shares the last call had.
    """

    def __init__(self, network: nn.Module, microbatches: int = 4) -> None:
        self._microbatches = microbatches
        self._capture = Capture(network, own_forward(network), self._run, shares=True)
        self.reason, self.shared = "", 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._capture(args, kwargs)

    def _run(self, graph: NetworkGraph, values: Sequence[Any], loss: Any = None) -> list[Any]:
        leaves = graph.bind(values)
        self.reason, self.shared = graph.no_shares, 0
        (code,) = cut(graph, network_partitions(graph), [])
        (stage,) = make_stages([code], graph.network, graph.device)
        if loss is None:
            return graph.returned(stage(leaves, graph.values_of_numbers(graph.sizes(leaves))), ())
        parts = graph.split(leaves, self._microbatches)
        samples = [graph.batch_of(part) or 0 for part in parts]
        loss.value, self.shared = torch.zeros(()), len(parts)
        outputs = []
        for number, part in enumerate(parts):
            outputs = stage(part, graph.values_of_numbers(graph.sizes(part)))
            loss.value = loss.value + loss.share(outputs, samples, number)
        return outputs


def _together(parts: Sequence[Any], rows: Rows | None) -> Any:
    """What the micro-batches have returned, in autograd's graph."""
    return parts[0] if rows is None else torch.cat(list(parts), rows.dim)


@dataclass(frozen=True)
class Captured:
    """One call of a network.

    Attributes:
        graph: of the call.
        leaves: its tensors; see `NetworkGraph.bind`.
        values: the arguments of the graph.
        returned: what the call returned.
    """

    graph: NetworkGraph
    leaves: list[Tensor]
    values: Sequence[Any]
    returned: Any


def captured(network: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """Call a network, captured, as one stage."""
    staged = Staged(network, nowhere, divides=True)
    returned = staged(*args, **kwargs)
    (graph,) = staged.graphs
    return Captured(graph, graph.bind(staged.values), staged.values, returned)


def graph_of(network: nn.Module, *args: Any, **kwargs: Any) -> NetworkGraph:
    """The graph of a call."""
    return captured(network, *args, **kwargs).graph


def outputs_and_gradients(
    network: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Tensor | None]:
    """Outputs of a call, gradients of parameters and inputs, and buffers afterwards."""
    leaves = [t for _, t in tensors_in((args, kwargs)) if t.is_leaf and t.is_floating_point()]
    for leaf in leaves:
        leaf.grad = None
    network.zero_grad()
    torch.manual_seed(0)
    outputs = [value for _, value in tensors_in(call(*args, **kwargs))]
    losses = [value.square().sum() for value in outputs if value.requires_grad]
    if losses:
        torch.stack([loss.double() for loss in losses]).sum().backward()
    gradients = [p.grad for p in network.parameters()] + [leaf.grad for leaf in leaves]
    kept = [*outputs, *gradients, *network.buffers()]
    return [None if value is None else value.detach().clone() for value in kept]


def compared(network: nn.Module, *args: Any, microbatches: int = 2) -> InParts:
    """Compare calls in micro-batches with those of a twin, and with another batch size."""
    network, batch = network.double(), len(args[0])
    twin, parts = deepcopy(network), InParts(network, microbatches)
    for size in (batch, batch - 1, batch):
        some = [arg[:size] if arg.dim() and len(arg) == batch else arg for arg in args]
        compared_once(network, twin, parts, *some)
    return parts


def compared_once(network: nn.Module, twin: nn.Module, parts: InParts, *args: Tensor) -> None:
    """Compare one call in micro-batches, forward and backward, with that of a twin."""
    expected = outputs_and_gradients(twin, twin, *args)
    found = outputs_and_gradients(network, parts, *args)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether all bits are equal; what is not a number equals itself."""
    return len(one) == len(other) and all(
        a is b
        or (a is not None and b is not None and torch.equal(a.nan_to_num(7), b.nan_to_num(7)))
        for a, b in zip(one, other)
    )
