"""Where a traced network may be cut, and what crosses each cut."""

from __future__ import annotations

from torch import fx

from lightning_hybrid.network.graph import Layer, NetworkGraph, all_inputs, size_from
from lightning_hybrid.network.merge import Value


class Cuts:
    """Cuts of a graph by position: position p lies before layer number p.

    Args:
        graph: the traced network.
    """

    def __init__(self, graph: NetworkGraph) -> None:
        self.graph = graph
        count = len(graph.layers)
        self._made: dict[fx.Node, int] = dict.fromkeys(graph.inputs, -1)
        self._last_use: dict[fx.Node, int] = {}
        self._last_size = -1
        spans: dict[str, tuple[int, int]] = {}
        changed: set[str] = set()
        self.reads: list[set[fx.Node]] = []
        """per layer: the tensors that it takes"""
        for index, layer in enumerate(graph.layers):
            inputs = all_inputs(layer.node)
            self.reads.append({node for node in inputs if node in self._made})
            if any(node.target is size_from for node in inputs):
                self._last_size = index
            self._last_use.update(dict.fromkeys(self.reads[-1], index))
            self._made.update(dict.fromkeys((layer.node, *layer.parts), index))
            for name in layer.parameters | layer.buffers:
                spans[name] = spans.get(name, (index, index))[0], index
            changed |= layer.mutated_names
        self._last_use.update({node: count for node in graph.outputs if node in self._made})
        # what only is read may be used on both sides of a cut
        self._spans = {n: s for n, s in spans.items() if n in changed}
        calls = [{i for i, y in enumerate(graph.layers) if y.module in m} for m in graph.memories]
        self._memories = [(min(called), max(called)) for called in calls if called]
        self._order = {node: number for number, node in enumerate(graph.graph.nodes)}

    def crossing(self, position: int) -> list[fx.Node]:
        """The tensors made before the position and used after it, in the order of the graph."""
        nodes = [
            node for node, last in self._last_use.items() if self._made[node] < position <= last
        ]
        return sorted(nodes, key=self._order.__getitem__)

    def bytes(self, position: int) -> int:
        """Size of all that crosses, at the traced batch size."""
        if position == len(self.graph.layers):
            nodes = list(dict.fromkeys(self.graph.outputs))
        else:
            nodes = self.crossing(position)
        return sum(v.bytes for v in map(self.graph.value, nodes) if v is not None)

    def refusal(self, position: int) -> str | None:
        """Why the network may not be cut here; None: it may."""
        crossing = self.crossing(position)
        if not crossing:
            return "no tensor crosses"
        for name, (first, last) in self._spans.items():
            if first < position <= last:
                one, other = _called(self.graph.layers[first]), _called(self.graph.layers[last])
                return f"{name!r} changes, and is used by {one} before the cut and {other} after it"
        for first, last in self._memories:
            if first < position <= last:
                one, other = _called(self.graph.layers[first]), _called(self.graph.layers[last])
                return f"{one}, before the cut, and {other}, after it, change the same attribute"
        for node in crossing:
            if self.graph.value(node) is None:
                return f"{node.name}, which crosses, is no tensor"
        values = [value for value in map(self.graph.value, crossing) if value is not None]
        if position <= self._last_size and not any(value.batch_dim for value in values):
            return "the batch size is needed later, and no tensor that crosses shows it"
        return self._changed_later(position, values)

    def _changed_later(self, position: int, values: list[Value]) -> str | None:
        storages = [set(numbers) for numbers in zip(*(value.storages for value in values))]
        for layer in self.graph.layers[position:]:
            if any(held & changed for held, changed in zip(storages, layer.mutated)):
                return f"{_called(layer)} changes in place what crosses"
        return None


def _called(layer: Layer) -> str:
    return repr(layer.module if layer.is_module else layer.name)
