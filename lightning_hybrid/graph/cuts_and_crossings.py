"""Where a captured network may be cut, and what crosses each cut."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import combinations
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from lightning_hybrid._torch.graphs import is_enter_autocast
from lightning_hybrid._torch.symbols import captured_value
from lightning_hybrid.graph.graph import Layer, NetworkGraph
from lightning_hybrid.graph.source_places import place_of

_SPLITS = {"split", "chunk", "unbind", "split_with_sizes"}
"""Operations, as methods or functions, whose results are views that do not overlap, if their input
has a place of its own in memory for each entry."""
_WITHIN = {
    operator.getitem,
    *("transpose", "permute", "view", "unsqueeze", "squeeze", "select", "detach", "contiguous"),
    *(torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.select),
}
"""Operations whose result, if it is a view, shows nothing but what its input shows."""


class Cuts:
    """For each position in a graph: what would cross a cut there, and whether a cut is allowed.

    Position p lies before layer number p; the last position, after all layers, is their number.

    Args:
        graph: the captured network.
    """

    def __init__(self, graph: NetworkGraph) -> None:
        self.graph = graph
        count = len(graph.layers)
        self._made: dict[fx.Node, int] = dict.fromkeys(graph.inputs, -1)
        self._last_use: dict[fx.Node, int] = {}
        self.reads: list[set[fx.Node]] = []
        """per layer: the nodes that it takes: inputs of the graph, and results of earlier layers"""
        spans: dict[str, tuple[int, int]] = {}
        # a tensor crosses all cuts between the layer that makes it and the last one that takes it
        for index, layer in enumerate(graph.layers):
            taken = set().union(*map(graph.inputs_through_scalars, (layer.node, *layer.parts)))
            self.reads.append({n for n in taken if n in self._made and not is_enter_autocast(n)})
            self._last_use.update(dict.fromkeys(self.reads[-1], index))
            self._made.update(dict.fromkeys((layer.node, *layer.parts), index))
            for name in layer.parameters | layer.buffers:
                spans[name] = spans.get(name, (index, index))[0], index
        returned = [*graph.tensor_outputs, *graph.scalar_outputs]
        for node in returned:
            for one in {node} if node in graph.info else graph.inputs_through_scalars(node):
                if one in self._made:
                    self._last_use[one] = count
        written = graph.written
        # a parameter or buffer that is only read may be used on both sides of a cut
        self._spans = {name: span for name, span in spans.items() if name in written}
        self._order = {node: number for number, node in enumerate(graph.graph.nodes)}
        self._memory = self._lives_of_memory(count)
        self._looks_back = max(
            (i for i, layer in enumerate(graph.layers) if _differentiates(layer.node)), default=-1
        )
        self._unknown = next(
            (i for i, layer in enumerate(graph.layers) if layer.effects.unknown is not None), count
        )

        self._made_weights = [
            (self._made[node], self._last_use[node])
            for node in graph.made_of_weights
            if node in self._made and node in self._last_use
        ]

    def _lives_of_memory(self, count: int) -> list[tuple[int, int, str]]:
        """Spans of layers that must not be cut: (first layer, last layer, why in words).

        A position p is inside of a span if first < p <= last. For each memory that is changed in
        place, the span reaches from the layer that makes it to the last layer that changes it: a
        copy on another rank would not see the change. For memory that several outputs share, the
        span reaches to the end, since the user may write to an output. (Pieces of one split do not
        overlap, so that a write to one is not seen in another.)

        Args:
            count: the number of layers.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for leaf in self.graph.leaves:
            if leaf.node in self.graph.memory:
                first.setdefault(self.graph.memory[leaf.node], -1)
        for index, layer in enumerate(self.graph.layers):
            for number in layer.effects.results:
                first.setdefault(number, index)
            for number in layer.effects.writes:
                last[number] = index
        lives = [
            (first[number], index, _called(self.graph.layers[index]) + " changes it in place")
            for number, index in last.items()
            if number in first
        ]
        sharing: dict[int, list[fx.Node]] = {}
        for node in self.graph.tensor_outputs:
            if node in self.graph.memory and self._made.get(node, -1) >= 0:
                sharing.setdefault(self.graph.memory[node], []).append(node)
        for number, nodes in sharing.items():
            both = self._overlapping(nodes)
            if both is not None:
                names = " and ".join(map(_shown, both))
                lives.append((first[number], count, f"outputs {names} share its memory"))
        return lives

    def _overlapping(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
        """Two of some nodes in one memory that may overlap; ``None``: no two of them do."""
        pieces = [(node, self._pieces(node)) for node in nodes]
        for (one, mine), (other, theirs) in combinations(pieces, 2):
            if all(mine[split] == theirs[split] for split in mine.keys() & theirs.keys()):
                return one, other
        return None

    def _pieces(self, node: fx.Node) -> dict[fx.Node, Any]:
        """Of each split that a tensor is a view of a piece of: the number of that piece."""
        found: dict[fx.Node, Any] = {}
        memory = self.graph.memory[node]
        viewed: fx.Node | None = node
        while viewed is not None:
            split = viewed.args[0] if viewed.target is operator.getitem else None
            if _splits(split):
                shown = self._shown_by(split, memory)
                if shown is not None and _has_own_places(shown):
                    found[split] = viewed.args[1]
                viewed = shown
            else:
                viewed = self._shown_by(viewed, memory) if viewed.target in _WITHIN else None
        return found

    def _shown_by(self, node: fx.Node, memory: int) -> fx.Node | None:
        """The one input of a view that lies in a memory; ``None``: none does, or several do."""
        shown = [n for n in node.all_input_nodes if self.graph.memory.get(n) == memory]
        return shown[0] if len(shown) == 1 else None

    def crossing(self, position: int) -> list[fx.Node]:
        """The nodes that a cut at a position would send on: made before it, used after it.

        They are in the order of the graph.
        """
        nodes = [
            node for node, last in self._last_use.items() if self._made[node] < position <= last
        ]
        return sorted(nodes, key=self._order.__getitem__)

    def crosses_made_of_weights(self, position: int) -> bool:
        """Whether a tensor that is computed from weights alone would cross a cut at a position.

        A cut there is allowed, but other positions are better.
        """
        return any(made < position <= last for made, last in self._made_weights)

    def bytes(self, position: int) -> int:
        """Bytes of the tensors that would cross a cut at a position, at the captured batch size.

        For the position after the last layer: bytes of the network's tensor outputs.
        """
        graph = self.graph
        last = position == len(graph.layers)
        nodes = graph.tensor_outputs if last else self.crossing(position)
        return sum(graph.info[node].bytes for node in nodes if node in graph.info)

    def refusal(self, position: int) -> str | None:
        """Why the network must not be cut at a position; ``None``: a cut is allowed.

        The text is a clause, such as "no tensor crosses", for messages like "cannot cut here: ...".
        """
        layers = self.graph.layers
        if position == 0:  # in a further graph of a network, first stages may have no layers
            return self._does_not_travel(position)
        before = layers[position - 1]
        if position > self._unknown:
            layer = layers[self._unknown]
            return f"what {_called(layer)} does {layer.effects.unknown}"
        if position <= self._looks_back:
            return f"{_called(layers[self._looks_back])} differentiates what comes before it"
        if not before.effects.ambient:
            return (
                f"it lies between {_called(before)} and the place where a transformation of "
                "functions (torch.vmap, torch.func), derivatives in forward mode or inference mode "
                "end"
            )
        return self._does_not_travel(position) or self._changes_later(position)

    def _does_not_travel(self, position: int) -> str | None:
        crossing = self.crossing(position)
        if not crossing and 0 < position < len(self.graph.layers):
            return "no tensor crosses"
        # a receiver must know shapes beforehand, and links send tensors alone
        numbers = {leaf.node for leaf in self.graph.leaves if leaf.number}
        for node in crossing:
            info = self.graph.info.get(node)
            if info is None and node not in numbers:
                return f"{_shown(node)}, which crosses, is no tensor"
            if info is not None and not info.is_strided:
                return f"{_shown(node)}, which crosses, is not dense"
            if info is not None and not info.free:
                return f"the shape of {_shown(node)}, which crosses, depends on values"
        return None

    def _changes_later(self, position: int) -> str | None:
        layers = self.graph.layers
        for name, (first, last) in self._spans.items():
            if first < position <= last:
                one, other = _called(layers[first]), _called(layers[last])
                return f"{name!r} changes, and is used by {one} before the cut and {other} after it"
        for first, last, why in self._memory:
            if first < position <= last:
                return f"memory made before the cut is used after it, and {why}"
        return None


def _splits(node: Any) -> TypeGuard[fx.Node]:
    """Whether a node makes views of its input that do not overlap."""
    if not isinstance(node, fx.Node):
        return False
    return node.target in _SPLITS or getattr(node.target, "__name__", "") in _SPLITS


def _has_own_places(node: fx.Node) -> bool:
    """Whether no two entries of a tensor lie at one place, as they do after ``expand``."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return False
    places = [
        (captured_value(s), captured_value(n)) for s, n in zip(example.stride(), example.shape)
    ]
    if any(value is None for pair in places for value in pair):
        return False
    behind = 1
    for stride, size in sorted(pair for pair in places if pair[1] != 1):
        if stride < behind:
            return False
        behind = stride * size
    return True


def _differentiates(node: fx.Node) -> bool:
    return node.target is torch.autograd.grad or (
        node.op == "call_method" and node.target == "backward"
    )


def _called(layer: Layer) -> str:
    return _at(repr(f"{layer.module}.{layer.name}".removeprefix(".")), layer.node)


def _shown(node: fx.Node) -> str:
    return _at(repr(node.name), node)


def _at(name: str, node: fx.Node) -> str:
    place = place_of(node)
    return name if place is None else f"{name} ({place})"
