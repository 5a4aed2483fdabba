"""Copy operations of a graph together with the modes (no gradients, autocast) that they run in.

Operations that switch a mode are nodes of the graph like any other. They are not copied. Instead,
where the next operation to copy runs in other modes than the one before it, the copy gets
operations that switch, and at its end those that switch back. So a network may be cut inside of
such a region, and the driver may compute a part of it. (Regions that transform functions, ``vmap``
for one, cannot be left and entered again.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
class OpenModes:
    """The modes in which an operation of a graph runs.

    Attributes:
        gradients: whether gradients are switched on.
        autocasts: the nodes that have entered the regions of autocast (switched on or off) that the
            operation lies in, the outermost region first.
    """

    gradients: bool
    autocasts: tuple[fx.Node, ...] = ()


def modes_of(graph: NetworkGraph) -> list[OpenModes]:
    """The modes before each layer of a graph, in order, and at last those after the last layer.

    The list has one entry more than the graph has layers.
    """
    found = [OpenModes(graph.differentiable)]
    for layer in graph.layers:
        node, around = layer.node, found[-1]
        entered = entered_autocast(node)
        if node.target is set_gradients:
            around = replace(around, gradients=bool(node.args[0]))
        elif is_enter_autocast(node):
            around = replace(around, autocasts=(*around.autocasts, node))
        elif entered is not None:
            left = tuple(one for one in around.autocasts if one is not entered)
            around = replace(around, autocasts=left)
        found.append(around)
    return found


class Copier:
    """Copies operations of a captured graph, and the scalars that they need, into a new graph.

    Call `add` for each operation in the order of the graph, then `finished` once.

    Args:
        graph: the captured network.
        taken: the nodes that become placeholders of the new graph, in order.
        as_tensors: those of ``taken`` that are Python numbers in the captured graph, and that the
            new graph is given as tensors of one number (leaves with `Leaf.number`).
    """

    def __init__(
        self, graph: NetworkGraph, taken: Sequence[fx.Node], as_tensors: Collection[fx.Node] = ()
    ) -> None:
        self._graph = fx.Graph()
        self._as_tensors = as_tensors
        self._begin = self._now = OpenModes(graph.differentiable)
        self._copies = {node: self._graph.placeholder(node.name) for node in taken}
        self._numbers: dict[fx.Node, fx.Node] = {}
        pairs = zip(graph.layers, modes_of(graph))
        self._modes = {n: modes for y, modes in pairs for n in (y.node, *y.parts)}

    def add(self, node: fx.Node) -> None:
        """Copy one operation, to run in the modes that it has in the captured graph.

        An operation that switches modes is left out. All tensors that the operation takes must be
        placeholders, or added before.
        """
        if node.target is set_gradients or is_enter_autocast(node) or entered_autocast(node):
            return
        self._switch(self._modes.get(node, self._now))
        self._copies[node] = self._graph.node_copy(node, self._copy)

    def finished(self, outputs: Sequence[fx.Node]) -> fx.Graph:
        """Complete the new graph: switch the modes back, and return the copies of ``outputs``.

        Args:
            outputs: nodes of the captured graph, whose values the new graph returns as a list.

        Returns:
            The new graph.
        """
        # (a number that arrived as a tensor is passed on as that tensor)
        found = [self._copies[n] if n in self._as_tensors else self._copy(n) for n in outputs]
        self._switch(self._begin)  # for the code that runs next
        self._graph.output(found)
        self._graph.lint()
        return self._graph

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self._as_tensors:
            if node not in self._numbers:
                self._numbers[node] = self._graph.call_method("item", (self._copies[node],))
            return self._numbers[node]
        if node not in self._copies:  # a constant, or arithmetic on numbers
            self._copies[node] = self._graph.node_copy(node, self._copy)
        return self._copies[node]

    def _switch(self, wanted: OpenModes) -> None:
        """Append operations to the new graph that switch from its present modes to ``wanted``."""
        before, after = self._now.autocasts, wanted.autocasts
        # (regions lie in each other, so the innermost is left first)
        kept = sum(1 for one, other in zip(before, after) if one is other)
        for node in reversed(before[kept:]):
            self._graph.call_function(exit_autocast, (self._copies[node],))
        if self._now.gradients != wanted.gradients:
            self._graph.call_function(set_gradients, (wanted.gradients,))
        for node in after[kept:]:
            self._copies[node] = self._graph.node_copy(node)
        self._now = wanted
