"""Regions without gradients, or with autocast, that a cut may lie inside of.

What switches a mode is an operation of the graph like any other. Where a network is cut inside of
such a region, the stage before the cut switches back, and the one after it switches again.
(Regions that transform functions, ``vmap`` for one, cannot be left and entered again.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from lightning_hybrid._torch.graphs import entered_autocast, is_enter_autocast, set_gradients
from lightning_hybrid.graph.graph import Layer, NetworkGraph


@dataclass(frozen=True)
class Open:
    """The regions that a place in a graph lies in.

    Attributes:
        gradients: whether they are switched on there.
        autocasts: what entered the regions with (or without) autocast, the outermost first.
    """

    gradients: bool
    autocasts: tuple[fx.Node, ...] = ()


def open_at(graph: NetworkGraph, position: int) -> Open:
    """The regions around the place before the layer number ``position``."""
    return _after(graph.layers[:position], Open(graph.differentiable))


def _after(layers: Sequence[Layer], around: Open) -> Open:
    for layer in layers:
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
