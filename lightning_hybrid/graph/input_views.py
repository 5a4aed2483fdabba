"""Outputs of a network that are views of its inputs: ``return logits, x[:, -1]``.

On one device a change of such an output in place changes the input. What the last stage sends is a
copy, so the driver makes the view itself, of the tensor that the call was given.
"""

from __future__ import annotations

from torch import fx

from lightning_hybrid.graph.annotate import Effects
from lightning_hybrid.graph.graph import NetworkGraph, reached
from lightning_hybrid.graph.three_parts import Beside


def views_of_inputs(graph: NetworkGraph) -> Beside | None:
    """What computes the outputs of a graph that are views of an input, and need no gradient.

    (One that needs a gradient comes from the stages, which its backward goes through.)
    """
    memory = {graph.memory[node] for node in graph.inputs if node in graph.memory}
    effects = {layer.node: layer.effects for layer in graph.layers}
    nodes, views = set[fx.Node](), list[fx.Node]()
    for node in graph.tensor_outputs:
        shown = graph.memory.get(node)
        if node in graph.place or shown not in memory or node.meta["example_value"].requires_grad:
            continue
        behind = reached([node], lambda n: n.all_input_nodes)
        if all(
            n in graph.place
            or graph.is_scalar(n)
            or (_looks(effects[n], shown) if n in effects else graph.memory.get(n) == shown)
            for n in behind
        ):
            views.append(node)
            nodes |= behind
    return Beside(graph, nodes, views) if views else None


def _looks(effects: Effects, memory: int) -> bool:
    """Whether an operation only returns one or several views of this memory."""
    return effects.unknown is None and not effects.writes and effects.results == {memory}
