"""Regions without gradients, or with autocast, that a cut may lie inside of.

What switches a mode is an operation of the graph like any other. Where a network is cut inside of
such a region, the stage before the cut switches back, and the one after it switches again.
(Regions that transform functions, ``vmap`` for one, cannot be left and entered again.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from lightning_hybrid._torch.graphs import (
    entered_autocast,
    exit_autocast,
    is_enter_autocast,
    set_gradients,
)
from lightning_hybrid.graph.graph import NetworkGraph


@dataclass(frozen=True)
class Open:
    """The modes at a place in a graph.

    Attributes:
        gradients: whether they are switched on.
        autocasts: the nodes that entered the regions of autocast (switched on or off) that the
            place lies in, the outermost first.
    """

    gradients: bool
    autocasts: tuple[fx.Node, ...] = ()


def open_at(graph: NetworkGraph, position: int) -> Open:
    """The modes before the layer number ``position``."""
    around = Open(graph.differentiable)
    for layer in graph.layers[:position]:
        node = layer.node
        entered = entered_autocast(node)
        if node.target is set_gradients:
            around = replace(around, gradients=bool(node.args[0]))
        elif is_enter_autocast(node):
            around = replace(around, autocasts=(*around.autocasts, node))
        elif entered is not None:
            left = tuple(one for one in around.autocasts if one is not entered)
            around = replace(around, autocasts=left)
    return around


def switched(code: fx.Graph, now: Open, wanted: Open) -> Open:
    """Append to a graph the operations that switch from the modes ``now`` to those ``wanted``.

    Args:
        code: the graph, which is being written.
        now: the modes at its end, with nodes of this graph.
        wanted: the modes at a place in the captured graph, with nodes of that one.

    Returns:
        The modes at its end then, with nodes of this graph.
    """
    if now == wanted:
        return now
    # (regions lie in each other, so the innermost is left first)
    for node in reversed(now.autocasts):
        code.call_function(exit_autocast, (node,))
    if now.gradients != wanted.gradients:
        code.call_function(set_gradients, (wanted.gradients,))
    return replace(wanted, autocasts=tuple(code.node_copy(n) for n in wanted.autocasts))
