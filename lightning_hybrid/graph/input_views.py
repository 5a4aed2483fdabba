"""Outputs of a network that are views of its inputs: ``return logits, x[:, -1]``.

On one device a change of such an output in place changes the input. What the last stage sends is a
copy, so the driver makes the view itself, of the tensor that the call was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hybrid.graph.annotate import Effects, arguments_of, called
from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.graph.reached import reached


@dataclass(frozen=True)
class InputView:
    """An output that is a view of an input, and needs no gradient.

    Attributes:
        output: its number among the tensor outputs of the graph.
        nodes: the nodes that compute it, in order: placeholders, sizes, views.
    """

    output: int
    nodes: tuple[fx.Node, ...]

    def of(self, graph: NetworkGraph, values: Sequence[Any]) -> Tensor:
        """The view in a call, made of the tensors that the call was given.

        Args:
            graph: the captured network.
            values: the arguments of the graph in this call.
        """
        found = {n: values[graph.place[n]] for n in self.nodes if n in graph.place}
        # the output was captured without a gradient, and is to have none here
        learns = any(isinstance(v, Tensor) and v.requires_grad for v in found.values())
        with torch.no_grad() if learns else nullcontext():
            for node in self.nodes:
                if node not in found:
                    found[node] = called(node, *arguments_of(node, found))
        view: Tensor = found[self.nodes[-1]]
        return view


def views_of_inputs(graph: NetworkGraph) -> tuple[InputView, ...]:
    """The outputs of a graph that are views of an input, made by nothing but views of it."""
    memory = {graph.memory[node] for node in graph.inputs if node in graph.memory}
    effects = {layer.node: layer.effects for layer in graph.layers}
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    found = []
    for number, node in enumerate(graph.tensor_outputs):
        shown = graph.memory.get(node)
        # an output that needs a gradient comes from the stages, which its backward goes through
        if node in graph.place or shown not in memory or node.meta["example_value"].requires_grad:
            continue
        nodes = sorted(reached([node], lambda n: n.all_input_nodes), key=order.__getitem__)
        if all(
            n in graph.place
            or graph.is_scalar(n)
            or (_looks(effects[n], shown) if n in effects else graph.memory.get(n) == shown)
            for n in nodes
        ):
            found.append(InputView(number, tuple(nodes)))
    return tuple(found)


def _looks(effects: Effects, memory: int) -> bool:
    """Whether an operation only returns one or several views of this memory."""
    return effects.unknown is None and not effects.writes and effects.results == {memory}
