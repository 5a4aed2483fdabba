"""A captured network in three parts, so that batches go through it in micro-batches.

* The *prologue* is computed from the call's inputs alone and needs all samples: random masks,
  statistics of the inputs. It runs once, on the driver, and its results are split like inputs.
* The *heavy part* treats samples one by one. It goes through the stages in micro-batches.
* The *tail* is where samples meet, and all that follows from it: losses inside of the network. It
  runs once, on the driver, on what the heavy part has returned for all samples.

A network in which samples do not meet is all heavy part. One whose prologue and tail would hold
more than `LIGHT` of the load takes its batches whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hybrid._torch.graphs import copy_source
from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid.graph.graph import NetworkGraph, reached
from lightning_hybrid.graph.graph_from_dynamo import describe_part
from lightning_hybrid.graph.loss_terms import Loss, LossOfCall, NoSum
from lightning_hybrid.graph.mode_regions import Copier
from lightning_hybrid.graph.partition import layer_flops
from lightning_hybrid.graph.row_proof import Followed, label_samples
from lightning_hybrid.graph.rows import Rows
from lightning_hybrid.graph.source_places import place_of
from lightning_hybrid.graph.stage_code import GraphCode

LIGHT = 0.1
"""The largest share of the load that prologue and tail may have together."""

LARGEST_WEIGHT = 2**20
"""Most bytes of a weight that the tail may use, since it is sent with every micro-batch."""

NO_LOSS = (
    "it returns no loss. Compute the loss in the network, from labels that it is given, to keep as "
    "many micro-batches alive as there are stages, and not all of them"
)
"""`NetworkGraph.no_shares` of a network in which samples do not meet, so that it has no tail."""

RunGraph = Callable[..., Sequence[Any]]
"""A function that computes a graph: ``run(graph, values)`` or ``run(graph, values, loss)``.

``values`` are the arguments of the graph in this call, in order; ``loss`` is the `LossOfCall` where
each micro-batch has a share of a loss. It returns the outputs of the graph, in order.
"""


class Divided:
    """A captured graph, divided into three parts if samples meet in it.

    The driver computes the prologue and the tail for all samples; the heavy part between them goes
    through the stages in micro-batches. Making an object changes ``graph`` (and `heavy`): it notes
    whether batches may be split, where the samples are, and whether micro-batches have shares of a
    loss.

    Args:
        graph: as captured.
        divides: whether it may be divided; if not, nothing is looked at, and batches are not split.
        draws: whether the heavy part may draw random numbers, for each micro-batch by itself; not
            under ``rng="device"``.
        shares: whether to look for a loss of which each micro-batch has a share, as `1f1b` needs.

    Attributes:
        heavy: the graph that goes through the stages: the heavy part, or all of the network if
            samples do not meet in it or if it cannot be divided.
    """

    def __init__(
        self, graph: NetworkGraph, *, divides: bool, draws: bool = True, shares: bool = False
    ) -> None:
        self._graph = self.heavy = graph
        self._loss: _LossInside | None = None
        if graph.is_static or not divides:
            return
        graph.meets = _lasting_change(graph)
        if graph.meets is not None:
            return
        parts = _divide(graph, draws)
        if parts.problem is not None:
            graph.meets = parts.problem
        elif not parts.tail and not parts.prologue:
            _label(graph, parts, {n: n for n in graph.graph.nodes})
            graph.no_shares = NO_LOSS
        else:
            self._take_apart(parts)
            if shares:
                self._find_loss(parts)

    def _take_apart(self, parts: _Parts) -> None:
        graph, nodes = self._graph, list(self._graph.graph.nodes)
        prologue = [node for node in nodes if node in parts.prologue]
        outputs = [node for node in nodes if node in parts.tail and node in graph.outputs]
        self._taken = parts.taken
        self._prologue = Beside(graph, parts.early, prologue)
        self._tail = Beside(graph, parts.tail, outputs)
        self._inputs, self.heavy = _heavy_part(graph, parts)

    def _find_loss(self, parts: _Parts) -> None:
        heavy = self.heavy
        try:
            if heavy.written_leaves or heavy.outputs != heavy.tensor_outputs:
                raise NoSum("it changes its arguments, or reads numbers from tensors")
            self._loss = _LossInside(self._graph, parts)
            heavy.no_shares = ""
        except NoSum as error:
            heavy.no_shares = str(error)

    def __call__(self, values: Sequence[Any], run: RunGraph) -> Sequence[Any]:
        """Compute a graph that is divided: the prologue, the heavy part by ``run``, and the tail.

        Must be called only if ``heavy.divided``.

        Args:
            values: the arguments of the whole graph, in order.
            run: computes the heavy part; see `RunGraph`. Where it gets a loss it may set
                `LossOfCall.value`; else the tail computes the loss.

        Returns:
            What the whole graph returns, in order.
        """
        graph = self._graph
        # The three parts, each from the values of those before it. Prologue and tail run under
        # autograd like the code around the network.
        found = graph.given(values)
        found |= self._prologue(found)
        inputs = [found[n] for n in self._inputs]
        if self._loss is None or self.heavy.no_shares or not torch.is_grad_enabled():
            found |= zip(self._taken, run(self.heavy, inputs))
            found |= self._tail(found)
        else:
            loss = self._loss.of(found, values)
            found |= zip(self._taken, run(self.heavy, inputs, loss))
            # (taken out: what autograd keeps of it refers to the loss)
            value, loss.value = loss.value, None
            found |= self._tail(found) if value is None else self._loss.rest(found, value)
        return [found[n] if isinstance(n, fx.Node) else n for n in graph.outputs]


# ---------------------------------------------------------------- which node is where


def _lasting_change(graph: NetworkGraph) -> str | None:
    """Why the network cannot be divided at all, as a clause; ``None``: nothing speaks against it.

    It changes a parameter or buffer that is no running statistic, so that the next micro-batch
    would see the change; or it is not known what an operation does.
    """
    for layer in graph.layers:
        where = f"{layer.module}.{layer.name}".removeprefix(".")
        other = [name for name in layer.written if not is_running_statistic(graph.network, name)]
        if other:
            return f"it changes {other[0]!r}"
        if layer.effects.unknown is not None:
            return f"what {where!r} does {layer.effects.unknown}"
    return None


def _divide(graph: NetworkGraph, draws: bool) -> _Parts:
    """Find the best way to divide a graph: one without a tail, else the first without a problem.

    Args:
        graph: the captured network.
        draws: as for `Divided`.
    """
    # Follow the samples: first with all sizes as the batch's that were equal in the first call,
    # then with that of the first input alone: an input may have the batch's size by accident
    # (weights of as many classes).
    found: list[_Parts] = []
    for symbols in dict.fromkeys((graph.symbols, graph.symbols[:1])):
        found.append(_Parts(graph, label_samples(graph, symbols), draws))
        if found[-1].problem is None and not found[-1].tail:
            return found[-1]
    return next((parts for parts in found if parts.problem is None), found[0])


def is_running_statistic(network: nn.Module, name: str) -> bool:
    """Whether a buffer of a network is a running statistic of batch normalisation.

    Each micro-batch may change such a buffer, as statistics are those of a micro-batch.

    Args:
        network: the network.
        name: dotted name of a parameter or buffer.
    """
    owner, _, key = name.rpartition(".")
    known = key in ("running_mean", "running_var", "num_batches_tracked")
    return known and isinstance(network.get_submodule(owner), BatchNorm)


class _Parts:
    """Assigns the nodes of a graph to its three parts, and says whether that division may be used.

    Args:
        graph: the captured network.
        followed: where the samples are in all nodes.
        draws: as for `Divided`.

    Attributes:
        prologue: nodes that are computed for all samples before the heavy part.
        early: the prologue, and all nodes that it is computed from.
        tail: nodes that are computed for all samples after the heavy part.
        heavy: nodes of the heavy part, and all nodes that they are computed from.
        taken: nodes whose values the heavy part returns, for the tail or the caller, in order.
        problem: why the graph must not be divided like this, as a text for `NetworkGraph.meets`;
            ``None``: it may.
    """

    def __init__(self, graph: NetworkGraph, followed: Followed, draws: bool) -> None:
        self.graph = graph
        self.followed = followed
        self._draws = draws
        self.layers = {n: y for y in graph.layers for n in (y.node, *y.parts)}
        self.order = {node: number for number, node in enumerate(graph.graph.nodes)}
        self.writers: dict[int, list[fx.Node]] = {}
        for layer in graph.layers:
            for memory in layer.effects.writes:
                self.writers.setdefault(memory, []).append(layer.node)
        # 1. The tail and the prologue, which the driver computes of all samples.
        outputs = [node for node in graph.outputs if isinstance(node, fx.Node)]
        tail = self._tail(outputs)
        # random numbers that depend on inputs alone are drawn in the prologue, in their order
        drawn = {n for n in tail if n in followed.early and self._is_random(n)}
        self.tail = tail - drawn
        self.prologue = followed.prologue | drawn
        self.early = self.computed_from(self.prologue)
        # 2. The heavy part: all that the tail or the caller takes, and all other layers that treat
        #    samples one by one, as these may write (running statistics) though nothing takes their
        #    results.
        wanted = {*outputs, *(taken for node in self.tail for taken in node.all_input_nodes)}
        wanted -= self.tail | self.prologue
        # (inputs, and numbers that follow from sizes, need not come from the heavy part)
        self.taken = [n for n in wanted if n in graph.tensors or not _is_given(n)]
        self.taken.sort(key=self.order.__getitem__)
        beside = self.tail | self.early
        own = [n for n in self.layers if n not in beside and not followed.meets(n)]
        self.heavy = self.computed_from([*own, *self.taken], stop=self.prologue)
        # 3. Whether this division is worth it (stages wait while the driver computes), and right.
        share = self._share(beside)
        if share > LIGHT:
            beside = self.tail | self.prologue
            self.problem: str | None = self._said(beside, f"{share:.0%} of the load follows")
        else:
            self.problem = self._mistake()

    def summary(self) -> str:
        """Say in a few words how the network is divided, such as "proof, tail 0.3%".

        See `NetworkGraph.split_by`.
        """
        words = ["proof"]
        for name, nodes in (("prologue", self.early), ("tail", self.tail)):
            if any(node in self.layers for node in nodes):
                words.append(f"{name} {self._share(nodes):.1%}")
        return ", ".join(words)

    def _is_random(self, node: fx.Node) -> bool:
        return node in self.layers and self.layers[node].effects.random

    def _made_of(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of a node, and the nodes before it that have changed these inputs in place."""
        taken = node.all_input_nodes
        return [*taken, *(w for n in taken for m in self._memory(n) for w in self._before(node, m))]

    def _before(self, node: fx.Node, memory: int) -> list[fx.Node]:
        """All nodes earlier in the graph than ``node`` that change this memory in place.

        Args:
            node: the node.
            memory: the number of the memory, as in `Effects.writes`.
        """
        return [w for w in self.writers.get(memory, ()) if self.order[w] < self.order[node]]

    def _memory(self, node: fx.Node) -> frozenset[int]:
        if node in self.graph.memory:
            return frozenset([self.graph.memory[node]])
        layer = self.layers.get(node)
        return frozenset() if layer is None else layer.effects.results

    def computed_from(
        self, nodes: Iterable[fx.Node], stop: Collection[fx.Node] = ()
    ) -> set[fx.Node]:
        """These nodes and all nodes that they are computed from, except beyond the nodes ``stop``.

        Neither the nodes ``stop`` nor nodes that only these are computed from are among them.
        """
        start = (node for node in nodes if node not in stop)
        return reached(start, lambda node: (n for n in self._made_of(node) if n not in stop))

    def _tail(self, outputs: Sequence[fx.Node]) -> set[fx.Node]:
        """The nodes that must be computed for all samples at once, as far as outputs need them.

        Args:
            outputs: the nodes that the network returns.
        """
        changed = {w for n in outputs for m in self._memory(n) for w in self.writers.get(m, ())}
        given = {m for n in self.graph.place for m in self._memory(n)}

        def following(node: fx.Node) -> Iterable[fx.Node]:
            yield from (n for n in self._made_of(node) if self._belongs(n) or self._is_early(n))
            # what the tail computes for itself is changed as in the graph (stages change inputs)
            for taken in filter(self._is_early, node.all_input_nodes):
                for memory in self._memory(taken) - given:
                    yield from self._before(node, memory)

        return reached(filter(self._belongs, (*outputs, *changed)), following)

    def _is_early(self, node: fx.Node) -> bool:
        """Whether the tail, if it takes a node, computes it again from the inputs.

        That is so for nodes computed from inputs alone; not for the inputs themselves, numbers and
        nodes of the prologue.
        """
        early = node in self.followed.early and node not in self.followed.prologue
        return early and not _is_given(node)

    def _belongs(self, node: fx.Node) -> bool:
        """Whether a node that the tail takes, or that the network returns, is in the tail.

        It is if samples have met in it, or if results of micro-batches for it could not be joined.
        """
        if _is_given(node):
            return False
        writes = self.layers[node].effects.writes if node in self.layers else frozenset()
        if writes and not self.followed.labels[node]:  # `h[mask] = 0` belongs to what it changes
            changed = [n for n in node.all_input_nodes if writes & self._memory(n)]
            return any(self.followed.meets(n) or self._belongs(n) for n in changed)
        label = self.followed.label(node)
        is_joined = label is None or (isinstance(label, Rows) and label.plain)
        if self.followed.meets(node) or not is_joined:
            return True
        # stages return nothing but tensors and numbers
        return node not in self.graph.info and not node.meta.get("scalar")

    def _mistake(self) -> str | None:
        """Why these parts would not compute what the graph does; ``None``: they do.

        The text is one for `problem`.
        """
        tail = self.tail
        prologue = self.prologue
        early = self.early
        # 1. What the driver computes must not be computed again by stages, or differently.
        for node in {*tail, *early} & self.layers.keys():
            twice = node in self.heavy and (node in tail or node in prologue)
            reason = self._of_beside(node, tail if node in tail else early, twice)
            if reason is not None:
                return self._said([node], reason)
        # 2. Random numbers, in the order of one device.
        if (reason := self._of_draws()) is not None:
            return reason
        # 3. No change is left out (a running statistic of samples that have met, which no output
        #    needs), nor made anew by each micro-batch in an input that all of them share.
        for layer in self.graph.layers:
            if layer.written and layer.node not in self.heavy:
                return self._said([layer.node], f"it changes {min(layer.written)!r}")
        for leaf in self.graph.written_leaves:
            if not isinstance(self.followed.label(leaf.node), Rows):
                return f"{leaf.name} is changed in place"
        # 4. What crosses between parts has its value of the moment when the graph reads it: a write
        #    that the graph does later must not come before the parts are joined.
        for node in (*self.taken, *self.graph.inputs, *prologue):
            readers = [self.order[u] for u in node.users if u in tail] or [len(self.order)]
            first = -1 if node in prologue else min(readers)
            changes = [w for m in self._memory(node) for w in self.writers.get(m, ())]
            late = [w for w in changes if self.order[w] > first and w not in early]
            if late:
                return f"{self.graph.place_of(late[0])} changes what is used for all samples"
        return next(filter(None, map(self._of_taken, (*self.taken, *prologue))), None)

    def _of_draws(self) -> str | None:
        """Why these parts would draw other random numbers than the graph; ``None``: they do not."""
        # (the driver draws the prologue's numbers first, wherever they are in the graph)
        random = [node for node in self.order if self._is_random(node)]
        own = [node for node in random if node in self.heavy and node not in self.early]
        if own and not self._draws:
            return f"{self._at(own[0])} draws random numbers, in the order of one device"
        late = next((node for node in random if node in self.tail), None)
        first = [self.order[node] for node in random if node in self.early]
        if late is not None and max(first, default=-1) > self.order[late]:
            return f"{self._at(late)} draws random numbers before others that are drawn first"
        return None

    def _of_beside(self, node: fx.Node, own: Collection[fx.Node], twice: bool) -> str | None:
        """Why the driver cannot compute an operation for all samples; ``None``: it can.

        The text is the end of a message, as ``then`` in `_said`.

        Args:
            node: the operation, of the prologue or the tail.
            own: all nodes that the driver computes with it.
            twice: whether the heavy part computes it too.
        """
        effects = self.layers[node].effects
        if twice and (effects.random or effects.writes):
            return "its result is used for single samples too"
        # a copy on another rank would not see the change, and stages would change an input again
        made = {n for n in own if n.op != "placeholder"}
        for memory in effects.writes:
            if not {n for n in self.order if memory in self._memory(n)}.issubset(made):
                return "it changes what was made before"
        return None if effects.ambient else "it is in a transformation of functions"

    def _of_taken(self, node: fx.Node) -> str | None:
        """Why a node's results in micro-batches cannot be joined, or cannot be sent to the driver.

        The text is one for `problem`; ``None``: they can be joined and sent.

        Args:
            node: a node in `taken`, or of the prologue.
        """
        graph, label = self.graph, self.followed.label(node)
        if isinstance(label, Rows) and label.outer != 1:
            return f"samples lie inside of a dimension of {graph.place_of(node)}"
        if node in graph.info and not graph.info[node].is_strided:
            return f"{graph.place_of(node)} is not dense"
        name = graph.tensors.get(node)
        if name is not None and graph.info[node].bytes > LARGEST_WEIGHT:
            return f"{name!r}, which is large, is used where samples have met"
        return None

    def _share(self, nodes: Collection[fx.Node]) -> float:
        loads = {layer.node: layer_flops(self.graph, layer) for layer in self.graph.layers}
        total = sum(loads.values()) or 1
        return sum(load for node, load in loads.items() if node in nodes) / total

    def _said(self, nodes: Iterable[fx.Node], then: str) -> str:
        """A message for the user: where samples meet first, and why the graph is not divided there.

        Args:
            nodes: the place where samples meet is looked for among these nodes and all nodes that
                they are computed from.
            then: the end of the sentence "samples meet in ..., and ...".
        """
        why = self.followed.why
        node = min(
            (n for n in self.computed_from(nodes) if n in why),
            key=self.order.__getitem__,
            default=min(nodes, key=self.order.__getitem__),
        )
        if node not in why:
            label = self.followed.label(node)
            if isinstance(label, Rows) and label.is_ordered:
                return f"samples meet in {self._at(node)}, and {then}"
            reads = node in self.followed.numbers
            what = "a number is read of all samples" if reads else "results cannot be joined"
            return f"{what} in {self._at(node)}, and {then}"
        then = f"{self._at(node, f' ({why[node].how})')}, and {then}"
        if not why[node].instead:
            return f"samples meet in {then}"
        return f"it could not be proven that samples stay apart in {then}. {why[node].instead}"

    def _at(self, node: fx.Node, how: str = "") -> str:
        place = place_of(node)
        return f"{self.graph.place_of(node)}{how}{f', {place}' if place else ''}"


# ---------------------------------------------------------------- the parts


def _label(heavy: NetworkGraph, parts: _Parts, copies: dict[fx.Node, fx.Node]) -> None:
    """Note in a graph where samples are in its inputs and outputs, and that batches may be split.

    Args:
        heavy: the graph that goes through the stages; changed.
        parts: the division of the captured graph.
        copies: per node of the captured graph, the same node in ``heavy``.
    """
    originals = {copy: node for node, copy in copies.items()}  # (clones of weights have none)

    def label(node: fx.Node) -> Rows | None:
        found = parts.followed.label(originals[node]) if node in originals else None
        return found if isinstance(found, Rows) else None

    written = {leaf.node for leaf in heavy.written_leaves}
    heavy.leaves = tuple(replace(leaf, rows=label(leaf.node)) for leaf in heavy.leaves)
    heavy.written_leaves = tuple(leaf for leaf in heavy.leaves if leaf.node in written)
    heavy.rows = {node: label(node) for node in heavy.tensor_outputs}
    heavy.meets = None
    heavy.split_by = parts.summary()


class Beside:
    """A part of a graph (prologue, tail) that the driver computes, outside of the stages.

    Autograd sees its operations like those of the code around the network.

    Args:
        graph: the captured network.
        nodes: the nodes of this part.
        returned: those of ``nodes`` whose values a call returns.
    """

    def __init__(
        self, graph: NetworkGraph, nodes: Collection[fx.Node], returned: Sequence[fx.Node]
    ) -> None:
        self._returned = returned
        own = [n for n in graph.graph.nodes if n in nodes and not _is_given(n)]
        takes = {n for node in own for n in node.all_input_nodes if n.op != "get_attr"}
        self._taken = [n for n in graph.graph.nodes if n in takes.difference(own)]
        copier = Copier(graph, self._taken)
        for node in own:
            copier.add(node)
        code = copier.finished(returned)
        self._code = GraphCode.of(code, graph.attributes, graph.device).function(graph.device)

    def __call__(self, found: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Compute this part; returns the value of each of the nodes ``returned``.

        Args:
            found: per node its value, at least for all nodes outside of this part that it takes.
        """
        if not self._returned:
            return {}
        return dict(zip(self._returned, self._code(*[found[n] for n in self._taken])))


class _LossInside:
    """A tail that computes a loss of which each micro-batch has a share, and what follows from it.

    (The tail is what a network computes for all samples after the stages. A share has the terms of
    one micro-batch's samples.)

    Args:
        graph: the captured network.
        parts: its division into three parts.

    Raises:
        NoSum: the tail is not such a loss, or computes more than what follows from the loss.
    """

    def __init__(self, graph: NetworkGraph, parts: _Parts) -> None:
        outputs = [n for n in graph.graph.nodes if n in parts.tail and n in graph.outputs]
        self._loss = Loss(graph, parts.tail, parts.taken, parts.followed, outputs)
        # 1. What is Known, as far as it is neither given nor in the prologue.
        made = [n for n in self._loss.known if n not in parts.prologue and n not in graph.place]
        known = parts.computed_from([*made, *self._loss.changes], stop=parts.prologue)
        self._known = Beside(graph, known, made)
        # 2. What follows, which must take nothing else of the heavy part.
        stop = {self._loss.node, *parts.prologue}
        following = parts.computed_from([n for n in outputs if n not in stop], stop=stop)
        if not following.isdisjoint(parts.taken):
            raise NoSum("what follows its loss takes results of all samples")
        tail = [n for n in following if n in parts.tail]
        self._rest = Beside(graph, tail, [n for n in outputs if n not in stop])

    def of(self, found: dict[fx.Node, Any], values: Sequence[Any]) -> LossOfCall:
        """Prepare the loss of a call, before the stages run; returns what computes its shares.

        Args:
            found: the values of inputs and of the prologue, per node.
            values: the arguments of the captured graph.
        """
        return self._loss.of(found | self._known(found), values)

    def rest(self, found: Mapping[fx.Node, Any], value: Tensor) -> dict[fx.Node, Any]:
        """Compute the outputs of the tail from the value of the loss.

        Returns the value of each of these nodes, and that of the node of the loss.

        Args:
            found: the values of inputs, of the prologue and of the heavy part, per node.
            value: the loss, a scalar.
        """
        loss = {self._loss.node: value}
        return loss | self._rest({**found, **loss})


def _is_given(node: fx.Node) -> bool:
    """Whether a node belongs to no part, since no part has to compute it.

    That is an input, a constant, or a number or shape that follows from sizes of inputs alone.
    """
    follows = node.meta.get("number") or node.meta.get("shape")
    return node.op in ("placeholder", "get_attr") or bool(follows)


def _heavy_part(graph: NetworkGraph, parts: _Parts) -> tuple[list[fx.Node], NetworkGraph]:
    """Make the graph of the heavy part.

    Args:
        graph: the captured network.
        parts: its division into three parts.

    Returns:
        The nodes of ``graph`` whose values the heavy part takes as arguments, in order, and the
        graph of the heavy part.
    """
    nodes = list(graph.graph.nodes)
    # 1. It takes inputs (also those that tell sizes) and results of the prologue.
    inputs = {n for n in parts.heavy if n.op == "placeholder"} | {*parts.taken} & {*graph.place}
    inputs |= {graph.leaves[number].node for number, _ in graph.where_sizes_are.values()}
    code, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    made = [n for n in nodes if n in parts.prologue and not parts.heavy.isdisjoint(n.users)]
    order = [*(n for n in nodes if n in inputs), *made]
    for node in order:
        copies[node] = copy = code.placeholder(node.name)
        copy.meta = {k: v for k, v in node.meta.items() if k not in ("scalar", "number")}
        copy_source(node, copy)
    # 2. It computes its own nodes, in the order of the graph.
    for node in nodes:
        if node in parts.heavy and node not in copies and node.op != "output":
            copies[node] = code.node_copy(node, copies.__getitem__)
    # 3. It returns what the tail or the caller takes.
    returned = []
    for node in parts.taken:
        copy = copies[node]
        if node in graph.tensors:  # a weight is the result of an operation of the last stage
            copy = code.call_method("clone", (copy,))
            copy.meta = {"example_value": node.meta["example_value"]}
        returned.append(copy)
    code.output(tuple(returned))
    # 4. It is described, and from now on treated, like a captured network.
    heavy = describe_part(graph, code, copies)
    _label(heavy, parts, copies)
    heavy.divided, before = True, {copies[node] for node in made}
    heavy.leaves = tuple(replace(leaf, made=leaf.node in before) for leaf in heavy.leaves)
    return order, heavy
