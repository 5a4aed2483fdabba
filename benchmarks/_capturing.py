"""Capture a network for one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.capture import Capture
from lightning_hybrid.capture.watched_calls import own_forward
from lightning_hybrid.graph import NetworkGraph, Stage, StageCode
from lightning_hybrid.graph.cut_stages import cut_at
from lightning_hybrid.stage.stage_check import run


def capture(network: nn.Module, *args: Any, **kwargs: Any) -> tuple[NetworkGraph, list[Tensor]]:
    """The graph of a call, and the tensors that the call brings.

    The call happens: running statistics move on.
    """
    found: list[tuple[NetworkGraph, list[Tensor]]] = []

    def note(graph: NetworkGraph, values: Sequence[Any]) -> list[Any]:
        found.append((graph, graph.bind(values)))
        return outputs_of(graph, cut_at(graph, []), values)

    Capture(network, own_forward(network), note)(args, kwargs)
    return found[0]


def outputs_of(graph: NetworkGraph, codes: Sequence[StageCode], values: Sequence[Any]) -> list[Any]:
    """What a graph returns, from its arguments, by its stages."""
    stages = [Stage(code, graph.network, graph.device) for code in codes]
    leaves = graph.bind(values)
    results = run(graph, stages, leaves)
    found = dict(zip((*graph.tensor_outputs, *graph.scalar_outputs), results))
    found |= zip(graph.numbers, graph.values_of_numbers(graph.sizes(leaves)))
    return [found.get(n, n) if isinstance(n, torch.fx.Node) else n for n in graph.outputs]
