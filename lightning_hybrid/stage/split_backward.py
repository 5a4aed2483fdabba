"""A backward in two parts: first the gradients of the inputs, later those of the weights.

The first part asks autograd for the gradients of the inputs only. Autograd then computes, in each
operation on the way, only what leads to the inputs. The gradients that arrive at operations which
use weights are kept, and the second part starts from them: from each such operation to its weights,
and no further towards the inputs. So nothing is computed twice, except where an operation cannot
compute the two apart (batch normalisation, for instance, sums up the same numbers for both).

The result is exact if it is known which operation leads to which weights, and if each operation may
run twice. That is not so for the following, and a backward that has one of them is not split:

* operations of the user's (``autograd.Function``), which may do more than to return gradients;
* group normalisation in channels-last, which ends the process if it is asked for the gradients of
  its weights alone (`needs_input_gradients`);
* weights that two operations use (a recurrent layer, a layer that is called twice);
* outputs that do not depend on the inputs.

Hooks on parameters are called once, as ever, in the second part. A stage has no hooks on other
tensors: TorchDynamo captures no code that sets them, and a function under
``torch.compiler.allow_in_graph``, into which it does not look, must not set them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_hybrid._torch.autograd import needs_input_gradients
from lightning_hybrid.graph import reached

CANNOT_BE_SPLIT = (
    "it has an autograd.Function, a weight that is used twice, an output that no input leads to, "
    "or group normalisation in channels-last"
)
"""Why :func:`input_part` cannot split a backward; part of a warning."""


def operations_behind(outputs: Sequence[Any]) -> list[Node]:
    """Find the user's operations (``autograd.Function``) in autograd's graph of some outputs.

    Args:
        outputs: tensors; other values are skipped.
    """
    start = [value.grad_fn for value in outputs if isinstance(value, Tensor) and value.grad_fn]
    nodes = reached(start, lambda node: (n for n, _ in node.next_functions if n is not None))
    return [node for node in nodes if isinstance(node, BackwardCFunction)]


@dataclass
class WeightPart:
    """The second part of a backward, which is still to be done.

    Attributes:
        groups: tuples of three lists: edges of the graph to start from, the gradients that have
            arrived at these edges, and the weights to compute the gradients of.
    """

    groups: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]]

    def run(self, *, keep: bool = False) -> None:
        """Compute the gradients of the weights, and add them to ``weight.grad``.

        Args:
            keep: whether the graph is kept for another backward.
        """
        # `inputs` keeps autograd from going on to what the first part has computed already
        for edges, gradients, weights in self.groups:
            torch.autograd.backward(edges, gradients, retain_graph=keep, inputs=weights)


def input_part(
    roots: Sequence[GradientEdge], starts: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightPart] | None:
    """Compute the gradients of the inputs, and keep what the gradients of the weights need.

    Called in place of an ordinary backward in stages that split (`zero_bubble`, `1f1b`).

    Args:
        roots: edges, in autograd's graph, of the outputs of the forward that require a gradient.
        starts: the gradient of each of these outputs.
        inputs: leaves of the graph that require a gradient.

    Returns:
        A pair: for each input its gradient (``None``: no output depends on it); and the second
        part, which the caller runs later. ``None`` in place of the pair: the backward cannot be
        split, and nothing was done.
    """
    # 1. The operations at which weights branch off from the way to the inputs.
    way = _PathsToInputs(roots, inputs)
    groups = way.groups()
    if groups is None:
        return None
    # 2. The gradients of the inputs, and those that arrive at these operations: autograd gives both
    #    in one pass.
    edges = dict.fromkeys(edge for edges, _ in groups for edge in edges)
    ends: list[Any] = [*inputs, *edges]  # tensors and edges
    found: Sequence[Tensor | None] = torch.autograd.grad(
        roots, ends, starts, retain_graph=True, allow_unused=True
    )
    arrived = dict(zip(edges, found[len(inputs) :]))
    # 3. What is left to do; operations at which nothing has arrived have no gradients to give.
    left = []
    for edges_of_group, weights in groups:
        present = [(e, g) for e in edges_of_group if (g := arrived.get(e)) is not None]
        if present:
            left.append(([e for e, _ in present], [g for _, g in present], weights))
    return list(found[: len(inputs)]), WeightPart(left)


@dataclass
class _BackwardNode:
    """An operation of autograd's graph; "behind" it are the operations that its gradients go to.

    Attributes:
        children: the next operations behind it, each with the index of the output there that the
            gradient belongs to.
        reaches: the set of the weights behind it: bit n stands for the n-th weight that was found.
        leads: whether it is an input, or an input is behind it.
        outputs: indices of its outputs that are used.
    """

    children: list[tuple[Node, int]]
    reaches: int = 0
    leads: bool = False
    outputs: set[int] = field(default_factory=set)


class _PathsToInputs:
    """Finds which operations of autograd's graph lead to inputs, and where weights branch off.

    Args:
        roots: edges of the outputs, where the backward begins.
        inputs: leaves whose gradients the first part of the backward computes.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self.roots = roots
        self._inputs = {get_gradient_edge(value).node for value in inputs}
        self._weights: list[Tensor] = []
        self._nodes: dict[Node, _BackwardNode] = {}  # children before their parents
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
        """Divide the weights into groups, each with the edges that its weight part starts from.

        Returns:
            For each group a pair of its edges and its weights; ``None``: the backward cannot be
            split.
        """
        if not self._splits or not all(self.leads(edge.node) for edge in self.roots):
            return None
        # A bound is an operation on the way to the inputs from which some weights are reached by
        # another way.
        bounds = [n for n in self._nodes if self.leads(n) and self._aside(n)]
        found, taken = [], set[Node]()
        for node in bounds:
            # Autograd frees what an operation has saved when it has run, so that no two weight
            # parts may run the same one; and weights that are also reached on the way to the inputs
            # would get gradients twice.
            behind, own = self._behind(node), self._reached(self._aside(node))
            children = (child for child, _ in self._nodes[node].children)
            if behind & taken or own & self._reached(filter(self.leads, children)):
                return None
            taken |= behind
            edges = [GradientEdge(node, nr) for nr in sorted(self._nodes[node].outputs)]
            found.append((edges, [w for n, w in enumerate(self._weights) if own >> n & 1]))
        return found

    def _reached(self, nodes: Iterable[Node]) -> int:
        return reduce(or_, (self._nodes[node].reaches for node in nodes), 0)

    def _aside(self, node: Node) -> list[Node]:
        """The operations directly behind ``node`` that lead to weights, but to no input."""
        children = (child for child, _ in self._nodes[node].children)
        return [n for n in children if self._nodes[n].reaches and not self.leads(n)]

    def _behind(self, node: Node) -> set[Node]:
        """All operations that a weight part runs if it starts from ``node``."""

        def children(node: Node) -> Iterable[Node]:
            return (child for child, _ in self._nodes[node].children if self._nodes[child].reaches)

        return reached(self._aside(node), children)

    def _walk(self, root: Node) -> None:
        """Record ``root`` and all operations behind it, without recursion: networks are deep."""
        todo = [(root, False)]
        while todo:
            node, done = todo.pop()
            if done:  # all behind it are known now
                record = self._nodes[node]
                for child, _ in record.children:
                    record.reaches |= self._nodes[child].reaches
                    record.leads |= self._nodes[child].leads
            elif node not in self._nodes:
                children = [(child, n) for child, n in node.next_functions if child is not None]
                record = self._nodes[node] = _BackwardNode(children)
                if isinstance(node, BackwardCFunction) or needs_input_gradients(node):
                    self._splits = False
                # (an input is a leaf, too: its gradient is wanted in the first part)
                if node in self._inputs:
                    record.leads = True
                elif not children and isinstance(leaf := getattr(node, "variable", None), Tensor):
                    record.reaches = 1 << len(self._weights)
                    self._weights.append(leaf)
                todo.append((node, True))
                todo += [(child, False) for child, _ in children]
