"""A backward in two parts: first the gradients of the inputs, later those of the weights.

A backward that is asked for the gradients of the inputs alone computes, of each operation on the
way, only what leads there. What arrives at the operations that weights flow into is kept, and the
weight part goes on from there: from each such operation to its weights, and not a step further down
the way, which has been gone. So nothing is computed twice except what an operation cannot compute
apart (batch normalisation, for one, sums up the same numbers for both).

That is exact as long as it can be told which operation leads to which weights, and as long as an
operation may run twice. Not so, and therefore not split:

* operations of the user's (``autograd.Function``), which may do more than to return gradients;
* one of torch's that ends the process where it is asked for the gradients of its weights alone;
* tensors that the network itself hooks or wants the gradients of, which would hear of them twice
  (:class:`HookWatch`);
* weights that two operations use of which one leads to the other (a recurrent layer).

Hooks on parameters are called once, as ever, with the weight part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_hybrid._torch.autograd import fails_apart

CANNOT_BE_SPLIT = (
    "it has an autograd.Function, a weight that is used twice, one after the other, or group "
    "normalisation in channels-last"
)
"""Why :func:`input_part` splits no backward."""


def operations_behind(outputs: Sequence[Any]) -> list[Node]:
    """The operations of the user's (``autograd.Function``) that outputs were computed with."""
    todo = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn]
    seen = set(todo)
    while todo:
        following = {node for node, _ in todo.pop().next_functions if node is not None} - seen
        seen |= following
        todo += following
    return [node for node in seen if isinstance(node, BackwardCFunction)]


class HookWatch(TorchFunctionMode):
    """Looks out for hooks in a forward, on what it computes.

    Attributes:
        seen: whether there was one.
    """

    _GRAD_FN: Any = Tensor.grad_fn
    # who asks for an operation of the graph may hook it
    _HOOKS = frozenset({Tensor.register_hook, Tensor.retain_grad, _GRAD_FN.__get__})

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen |= func in self._HOOKS
        return func(*args, **(kwargs or {}))


@dataclass
class WeightPart:
    """What is left to do of a backward.

    Attributes:
        groups: edges of the graph to go on from, what arrived there, and the weights behind them.
    """

    groups: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]]

    def run(self, *, keep: bool = False) -> None:
        """Add the gradients to those of the weights.

        Args:
            keep: whether the graph is to go back through again.
        """
        for edges, gradients, weights in self.groups:
            torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=weights)


def input_part(
    roots: Sequence[Tensor], starts: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightPart] | None:
    """Compute the gradients of the inputs, and keep what those of the weights need.

    Args:
        roots: what was computed; each wants a gradient.
        starts: the gradients of these.
        inputs: leaves of the graph; each wants a gradient.

    Returns:
        The gradients of the inputs (None: none leads there) and what is left to do; ``None``: the
        backward cannot be split, and nothing was done.
    """
    way = _Way(roots, inputs)
    groups = way.groups()
    if groups is None:
        return None
    on_way = [way.leads(edge.node) for edge in way.roots]
    edges = list(dict.fromkeys(edge for edges, _ in groups for edge in edges))
    wanted = [edge for edge in edges if way.leads(edge.node)]
    found: Sequence[Tensor | None] = [None] * (len(inputs) + len(wanted))
    ends: list[Any] = [*inputs, *wanted]  # tensors and edges
    if any(on_way):
        found = torch.autograd.grad(
            [root for root, leads in zip(roots, on_way) if leads],
            ends,
            [start for start, leads in zip(starts, on_way) if leads],
            retain_graph=True,
            allow_unused=True,
        )
    arrived: dict[GradientEdge, Tensor | None] = dict(zip(wanted, found[len(inputs) :]))
    # roots that no input leads to: the weight part has them to itself
    for edge, start, leads in zip(way.roots, starts, on_way):
        if not leads:
            so_far = arrived.get(edge)
            arrived[edge] = start if so_far is None else so_far + start
    return list(found[: len(inputs)]), WeightPart(_with_gradients(groups, arrived))


def _with_gradients(
    groups: list[tuple[list[GradientEdge], list[Tensor]]],
    arrived: dict[GradientEdge, Tensor | None],
) -> list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]]:
    made = []
    for edges, weights in groups:
        pairs = [(edge, arrived.get(edge)) for edge in edges]
        present = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if present:
            made.append(([e for e, _ in present], [g for _, g in present], weights))
    return made


@dataclass
class _Node:
    """An operation, as the walk has found it.

    Attributes:
        children: where its gradients go: operation, and number of the output of that one.
        reaches: set of the weights behind it, as bits.
        leads: whether an input is behind it.
        outputs: numbers of its outputs that are used.
    """

    children: list[tuple[Node, int]]
    reaches: int = 0
    leads: bool = False
    outputs: set[int] = field(default_factory=set)


class _Way:
    """Which operations lead to the inputs, and which weights flow into them.

    Args:
        roots: where the backward begins.
        inputs: where its first part ends.
    """

    def __init__(self, roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self.roots = [GradientEdge(*get_gradient_edge(root)[:2]) for root in roots]
        self._inputs = {get_gradient_edge(value).node for value in inputs}
        self._weights: list[Tensor] = []
        self._nodes: dict[Node, _Node] = {}  # children before their parents
        self._splits = True
        for edge in self.roots:
            self._walk(edge.node)
        for edge in self.roots:
            self._nodes[edge.node].outputs.add(edge.output_nr)
        for node in self._nodes.values():
            for child, number in node.children:
                self._nodes[child].outputs.add(number)

    def leads(self, node: Node) -> bool:
        return self._nodes[node].leads

    def groups(self) -> list[tuple[list[GradientEdge], list[Tensor]]] | None:
        """Edges to start the weight part from, with the weights behind them; None: no way.

        What two operations need both (a cast of a weight) can run only once, so they are a group.
        """
        if not self._splits:
            return None
        groups = _Groups()
        bounds = {n: r for n, r in self._nodes.items() if r.leads and self._aside(r)}
        bounds |= {
            edge.node: self._nodes[edge.node]
            for edge in self.roots
            if not self.leads(edge.node) and self._nodes[edge.node].reaches
        }
        for node, record in bounds.items():
            groups.join(node, node)
            for aside in self._behind(node, record):
                groups.join(node, aside)
        found = []
        for members in groups.of(bounds):
            own = further = 0
            edges: list[GradientEdge] = []
            for node in members:
                record = bounds[node]
                own |= self._weights_aside(node, record)
                further |= self._further(record)
                edges += [GradientEdge(node, number) for number in sorted(record.outputs)]
            if own & further:
                return None
            found.append((edges, [w for n, w in enumerate(self._weights) if own >> n & 1]))
        return found

    def _weights_aside(self, node: Node, record: _Node) -> int:
        if not record.leads:
            return record.reaches
        return _union(self._nodes[child].reaches for child in self._aside(record))

    def _further(self, record: _Node) -> int:
        """The weights behind an operation that its own way leads to."""
        if not record.leads:
            return 0
        ahead = (self._nodes[child] for child, _ in record.children)
        return _union(each.reaches for each in ahead if each.leads)

    def _aside(self, record: _Node) -> list[Node]:
        """Operations behind this one that lead to weights and not to the inputs."""
        children = ((child, self._nodes[child]) for child, _ in record.children)
        return [child for child, each in children if each.reaches and not each.leads]

    def _behind(self, node: Node, record: _Node) -> Iterator[Node]:
        """All operations that the weight part of this one runs."""
        todo = self._aside(record) if record.leads else [node]
        seen = set(todo)
        while todo:
            current = todo.pop()
            yield current
            for child, _ in self._nodes[current].children:
                if child not in seen and self._nodes[child].reaches:
                    seen.add(child)
                    todo.append(child)

    def _walk(self, root: Node) -> None:
        """Note all operations behind one, without recursion: networks are deep."""
        todo = [(root, False)]
        while todo:
            node, done = todo.pop()
            if done:
                record = self._nodes[node]
                for child, _ in record.children:
                    record.reaches |= self._nodes[child].reaches
                    record.leads |= self._nodes[child].leads
            elif node not in self._nodes:
                children = [(child, n) for child, n in node.next_functions if child is not None]
                record = self._nodes[node] = _Node(children)
                self._splits &= not isinstance(node, BackwardCFunction) and not fails_apart(node)
                if node in self._inputs:
                    record.leads = True
                elif not children and isinstance(leaf := getattr(node, "variable", None), Tensor):
                    record.reaches = 1 << len(self._weights)
                    self._weights.append(leaf)
                todo.append((node, True))
                todo += [(child, False) for child, _ in children]


def _union(sets: Iterator[int]) -> int:
    every = 0
    for each in sets:
        every |= each
    return every


class _Groups:
    """Sets that grow together (union-find)."""

    def __init__(self) -> None:
        self._leader: dict[Node, Node] = {}

    def join(self, a: Node, b: Node) -> None:
        self._leader[self._find(b)] = self._find(a)

    def of(self, nodes: Sequence[Node] | dict[Node, Any]) -> list[list[Node]]:
        """These nodes, those of one set together."""
        sets: dict[Node, list[Node]] = {}
        for node in nodes:
            sets.setdefault(self._find(node), []).append(node)
        return list(sets.values())

    def _find(self, node: Node) -> Node:
        leader = self._leader.setdefault(node, node)
        while leader is not self._leader[leader]:
            leader = self._leader[leader]
        self._leader[node] = leader
        return leader
