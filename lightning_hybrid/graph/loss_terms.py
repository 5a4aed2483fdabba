"""Losses inside of a network that are a sum over samples, and the share of each micro-batch.

The tail of a network (:mod:`lightning_hybrid.graph.three_parts`) runs once more on tensors without
memory. Every operator that it calls is recorded, and each result is one of these:

* *Known*: made of the inputs alone, such as the number of valid targets.
* *Rows*: each entry is made of one sample alone, by the rules of
  :mod:`lightning_hybrid.graph.row_rules`.
* *Sum*: a sum over samples of terms that are each made of one sample and Known factors. A mean is a
  sum divided by a Known number. The gradient of a Sum to a sample does not depend on the other
  samples.
* *After*: made of Sums and Known.
* *Meet*: everything else.

If all that the tail returns depends on samples through one Sum alone, that Sum is the loss here.
Each micro-batch computes its share, the terms of its own samples, when its forward ends, and also
the gradient of the share, but for one factor. Operations after the Sum change that factor alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hybrid._torch.graphs import higher_order_name
from lightning_hybrid._torch.symbols import is_symbolic, symbols_in, value_with
from lightning_hybrid._torch.tensors import as_they_are, schema
from lightning_hybrid._trees import Token, rebuild, tensors_in
from lightning_hybrid.graph.graph import NetworkGraph, SizesOfSymbols
from lightning_hybrid.graph.mode_regions import OpenModes, modes_of
from lightning_hybrid.graph.operation_effects import (
    FAILURES,
    arguments_of,
    called,
    memory_of,
    modes_restored,
)
from lightning_hybrid.graph.row_proof import Followed, Labelling, quiet
from lightning_hybrid.graph.row_rules import OperatorArguments, dims_of, name_of
from lightning_hybrid.graph.rows import Rows


class NoSum(Exception):
    """Raised if a loss is not a sum of terms of single samples, or is not known to be one.

    Its text says why, as a clause for `NetworkGraph.no_shares`; "it" is the network.
    """


class MadeOf(Enum):
    """What a tensor is made of that the tail of a network computes (all that follows the stages).

    * KNOWN: of inputs alone.
    * ROWS: each entry of one sample alone.
    * SUM: a sum over samples of terms that are each of one sample and Known.
    * AFTER: of Sums and Known.
    * MEET: anything else.
    """

    KNOWN = "known"
    ROWS = "rows"
    SUM = "sum"
    AFTER = "after"
    MEET = "meet"


_LINEAR = {"neg", "view", "_unsafe_view", "squeeze", "unsqueeze", "_to_copy", "clone", "alias"}
"""Operators whose result is a Sum if the tensor that they take is one."""

_SUMMED = (torch.float32, torch.float64)
"""Types in which shares may be added up; in others a sum may overflow where a mean does not."""

# ---------------------------------------------------------------- what is recorded


@dataclass(frozen=True)
class _Number(Token):
    """Stands for a tensor among the arguments of a recorded operator.

    Attributes:
        number: the number that `_TailRecorder` has given the tensor.
    """

    number: int


@dataclass(frozen=True)
class _TailOperator:
    """One call of an operator in the tail, recorded so that it can be run again on other tensors.

    Attributes:
        function: computes it.
        arguments: positional and keyword arguments, with a `_Number` in the place of each tensor.
        results: numbers of the tensors that it returns, in order.
        of_parts: whether symbolic sizes among its arguments get their values in a micro-batch; else
            those in the whole batch.
    """

    function: Callable[..., Any]
    arguments: Any
    results: tuple[int, ...]
    of_parts: bool

    def takes(self) -> set[int]:
        """Numbers of the tensors among its arguments."""
        return {leaf.number for leaf in self._leaves() if isinstance(leaf, _Number)}

    def symbols(self) -> set[Any]:
        """Size symbols that occur in numbers among its arguments."""
        return {s for leaf in self._leaves() if is_symbolic(leaf) for s in symbols_in(leaf)}

    def run(self, values: dict[int, Tensor], part: SizesOfSymbols, whole: SizesOfSymbols) -> None:
        """Run the operator on tensors from ``values``, and add its results to ``values``.

        Args:
            values: tensors by number, among them all that it takes; changed.
            part: values of the size symbols in the micro-batch.
            whole: values of the size symbols in the whole batch.
        """
        sizes = part if self.of_parts else whole
        args, kwargs = rebuild(
            self.arguments,
            lambda v: values[v.number] if isinstance(v, _Number) else value_with(v, sizes),
        )
        found = tensors_in(self.function(*args, **kwargs))
        values.update(zip(self.results, (tensor for _, tensor in found)))

    def _leaves(self) -> list[Any]:
        found: list[Any] = []
        rebuild(self.arguments, found.append)
        return found


def _needed(steps: Sequence[_TailOperator], results: Iterable[int]) -> list[_TailOperator]:
    """Those of the recorded operators, in order, that are needed to compute some tensors.

    Args:
        steps: recorded operators, in the order of their calls.
        results: numbers of the tensors to compute.
    """
    wanted, found = {*results}, []
    for step in reversed(steps):
        if not wanted.isdisjoint(step.results):
            wanted |= step.takes()
            found.append(step)
    return found[::-1]


class _TailRecorder(Labelling):
    """A dispatch mode that records the operators of a tail, and notes what results are made of.

    Each tensor gets a number. (The tail is what a network computes for all samples after the
    stages; see `MadeOf` for Known and Sum.)

    Args:
        symbols: the sympy symbols that stand for the number of samples.

    Attributes:
        known: recorded operators that take Known tensors alone; to be run once, for all samples.
        steps: all other recorded operators; to be run for each micro-batch.
    """

    def __init__(self, symbols: Sequence[Any]) -> None:
        super().__init__(symbols)
        self.known: list[_TailOperator] = []
        self.steps: list[_TailOperator] = []
        self._kinds: dict[int, MadeOf] = {}
        self._numbers: dict[int, int] = {}
        self._made: set[int] = set()  # numbers of what is not given
        self._kept: list[Tensor] = []  # the `id` of a freed tensor could be given to another
        self._followed: dict[int, frozenset[int]] = {}  # of an After, the Sums that it is made of

    def take(self, tensor: Tensor, kind: MadeOf) -> int:
        """Note what a tensor is made of; returns its number, a new one for a new tensor."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        self._kinds[id(tensor)] = kind
        return self._numbers[id(tensor)]

    def kind(self, tensor: Tensor) -> MadeOf:
        """What a tensor is made of, as noted by `take`; ``MadeOf.MEET`` for an unknown tensor."""
        return self._kinds.get(id(tensor), MadeOf.MEET)

    def number(self, tensor: Tensor) -> int:
        """The number that `take` has given a tensor."""
        return self._numbers[id(tensor)]

    def tensor(self, number: int) -> Tensor:
        """The tensor to which `take` has given this number."""
        return self._kept[number]

    def sums(self, tensor: Tensor) -> frozenset[int]:
        """Numbers of the Sums (`MadeOf.SUM`) that a tensor is computed from.

        Of a Sum it is its own number; empty for all else but `MadeOf.AFTER`.
        """
        if self.kind(tensor) is MadeOf.SUM:
            return frozenset([self.number(tensor)])
        return self._followed.get(id(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        call, arguments = OperatorArguments(func, args, kwargs), (args, kwargs)
        given = [tensor for _, tensor in tensors_in(call.values)]
        kinds = {self.kind(tensor) for tensor in given}
        changes = bool(schema(func).is_mutable)
        if changes and not self._is_own(given[0]):
            raise NoSum(f"{name_of(func)} changes what others see")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        outs = [tensor for _, tensor in tensors_in(result)]
        if kinds <= {MadeOf.KNOWN}:
            self._know(func, arguments, outs)
        elif MadeOf.MEET in kinds or func.namespace != "aten":
            self._meet(outs)
        elif kinds <= {MadeOf.KNOWN, MadeOf.ROWS}:
            if self._are_rows(outs):
                self._record(func, arguments, outs, MadeOf.ROWS)
            elif changes or not self._reduce(func, types, call, outs):
                self._meet(outs)
        elif changes or any(isinstance(self.label(tensor), Rows) for tensor in given):
            self._meet(outs)
        else:
            is_sum = self._is_linear(name_of(func), call, given) and outs[0].dtype in _SUMMED
            kind = MadeOf.SUM if is_sum else MadeOf.AFTER
            followed = frozenset[int]().union(*map(self.sums, given))
            self._record(func, arguments, outs, kind, of_parts=False)
            self._followed |= {id(out): followed for out in outs}
        return result

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether a recorded operator has made a tensor, and no other tensor shares its memory.

        (So that it may be changed in place without changing what is known of others.)
        """
        alone = len(self._views.get(memory_of(tensor)[0], ())) == 1
        return alone and self._numbers.get(id(tensor)) in self._made

    def _are_rows(self, outs: Sequence[Any]) -> bool:
        """Whether each micro-batch can compute its own samples of all these tensors by itself.

        That is so for tensors with one dimension of samples, in the order of the batch. It is not
        so if there are no tensors, or if one of ``outs`` is no tensor.
        """
        labels = [self.label(out) if isinstance(out, Tensor) else None for out in outs]
        rows = [one for one in labels if isinstance(one, Rows) and one.plain and one.outer == 1]
        return bool(outs) and len(rows) == len(outs)

    def _record(
        self,
        function: Callable[..., Any],
        arguments: Any,
        outs: Sequence[Tensor],
        kind: MadeOf,
        *,
        of_parts: bool = True,
    ) -> None:
        named = rebuild(
            arguments, lambda v: _Number(self.number(v)) if isinstance(v, Tensor) else v
        )
        results = tuple([self.take(out, kind) for out in outs])
        self._made.update(results)
        steps = self.known if kind is MadeOf.KNOWN else self.steps
        steps.append(_TailOperator(function, named, results, of_parts))

    def _meet(self, outs: Sequence[Tensor]) -> None:
        for out in outs:
            self.take(out, MadeOf.MEET)

    def _know(self, func: Any, arguments: Any, outs: Sequence[Tensor]) -> None:
        self._record(func, arguments, outs, MadeOf.KNOWN, of_parts=False)
        for out in outs:
            self.know(out)

    def know(self, tensor: Tensor) -> int:
        """Note a tensor as `MadeOf.KNOWN`, computed once for all samples; returns its number.

        Its label must have been set before. If its shape depends on the batch, it is split for
        micro-batches along the dimension of its samples; if it has no such dimension, it is noted
        as `MadeOf.MEET` instead.
        """
        number = self.take(tensor, MadeOf.KNOWN)
        if not any(self.depends(size) for size in tensor.shape):
            self.set(tensor, None)  # (the same for all micro-batches)
        elif not self._are_rows([tensor]):
            self.take(tensor, MadeOf.MEET)
        return number

    def _reduce(
        self, func: Any, types: Any, call: OperatorArguments, outs: Sequence[Tensor]
    ) -> bool:
        """If a call is a sum or mean over samples, record it as a Sum; returns whether it is one.

        Other results of the call are then noted as `MadeOf.MEET`. If it is no such sum or mean,
        nothing is recorded.

        Args:
            func: the operator that was called: a reduction, or a loss with one.
            types: as in ``__torch_dispatch__``.
            call: its arguments.
            outs: the tensors that it has returned.
        """
        name = name_of(func)
        value = call["self"]
        how = call["reduction"]
        if outs and outs[0].dtype not in _SUMMED:
            return False
        if name in ("sum", "mean") and self._are_rows([value]):
            dims, rows = dims_of(call), self.label(value)
            if not isinstance(rows, Rows) or rows.dim not in dims:
                return False
            count = prod(value.shape[dim] for dim in dims) if name == "mean" else None
            summed = (value, dims, bool(call["keepdim"])), {"dtype": call["dtype"]}
            self._add_up(torch.ops.aten.sum.dim_IntList, summed, outs[0], count)
            return True
        if how not in (1, 2):
            return False
        # a loss that is a sum (2) or mean (1) of its entries: are these of single samples?
        entries = super().__torch_dispatch__(func, types, (), {**call.values, "reduction": 0})
        first = entries[0] if isinstance(entries, tuple) else entries
        if not self._are_rows([first]):
            return False
        divisor = None
        if how == 1:
            divisor = first.numel()
            if name in ("nll_loss_forward", "nll_loss2d_forward"):
                divisor = self._total_weight(call)
        self._add_up(func, ((), {**call.values, "reduction": 2}), outs[0], divisor)
        self._meet(outs[1:])
        return True

    def _add_up(self, function: Any, arguments: Any, out: Tensor, divisor: Any) -> None:
        """Record a result as a sum over samples (`MadeOf.SUM`), divided by ``divisor``.

        Args:
            function: computes the sum, without the division.
            arguments: positional and keyword arguments of ``function``.
            out: the result.
            divisor: a number, or a Known tensor; ``None``: nothing is divided.
        """
        if divisor is None:
            self._record(function, arguments, [out], MadeOf.SUM)
            return
        added = torch.empty_like(out)
        self._record(function, arguments, [added], MadeOf.SUM)
        by = (added, divisor), dict[str, Any]()
        self._record(torch.ops.aten.div.Tensor, by, [out], MadeOf.SUM, of_parts=False)

    def _total_weight(self, call: OperatorArguments) -> Tensor:
        """Record the divisor of a mean of `torch.nn.functional.nll_loss` as Known; returns it.

        Args:
            call: the arguments of that loss.

        Raises:
            NoSum: the targets are not Known.
        """
        if self.kind(call["target"]) is not MadeOf.KNOWN:
            raise NoSum("the targets of its loss are computed by the network")
        total: Tensor = call["self"].new_empty(())
        weighed = call["target"], call["weight"], call["ignore_index"], call["self"].dtype
        self._record(total_weight, (weighed, {}), [total], MadeOf.KNOWN, of_parts=False)
        return total

    def _is_linear(self, name: str, call: OperatorArguments, given: Sequence[Tensor]) -> bool:
        """Whether the result of an operator on SUM, AFTER and KNOWN tensors (`MadeOf`) is a SUM.

        Args:
            name: of the operator, from `name_of`.
            call: its arguments.
            given: the tensors among them.
        """
        kinds, other = [self.kind(tensor) for tensor in given], call["other"]
        sums = kinds.count(MadeOf.SUM)
        if MadeOf.AFTER in kinds:
            return False
        if name in ("add", "sub"):
            # (what is Known would be added by each micro-batch)
            return sums == 2 or (type(other) in (int, float) and other == 0)
        if name in ("mul", "div"):
            divides = kinds[0] is MadeOf.SUM and call["rounding_mode"] is None
            return sums == 1 and (name == "mul" or divides)
        return name in _LINEAR or (name in ("sum", "mean") and len(given) == 1)


def total_weight(target: Tensor, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    """The divisor of a mean of `torch.nn.functional.nll_loss`: the sum of its targets' weights.

    Args:
        target: class numbers, of any shape.
        weight: (C,) the weight of each class; ``None``: each is 1.
        ignored: the class number of targets that do not count.
        dtype: the type of the result.

    Returns:
        A scalar.
    """
    counts = target != ignored
    if weight is None:
        return counts.sum().to(dtype)
    return weight[target.where(counts, 0)].where(counts, 0).sum().to(dtype)


# ---------------------------------------------------------------- a loss, and its shares


class Loss:
    """The loss that a network computes for all samples: a scalar that is a sum over samples.

    All that the tail (what follows the stages) returns must depend on samples through this scalar
    alone. Each micro-batch can then compute its share: the terms of its own samples.

    Args:
        graph: the captured network.
        tail: the nodes of its tail.
        taken: nodes whose values the heavy part (the stages) returns, in order.
        followed: where the samples are in all nodes.
        outputs: nodes of the tail that the network returns.

    Attributes:
        node: the node of the scalar.
        known: nodes computed from the inputs alone whose values shares are computed from.
        changes: nodes that change in place tensors that are computed from the inputs alone; the
            caller must run them before `of`.

    Raises:
        NoSum: there is no such scalar, or it is not known that there is.
    """

    def __init__(
        self,
        graph: NetworkGraph,
        tail: Iterable[fx.Node],
        taken: Sequence[fx.Node],
        followed: Followed,
        outputs: Sequence[fx.Node],
    ) -> None:
        self._graph = graph
        self._followed = followed
        self._early = set(followed.early)
        if any(node in graph.tensors for node in taken):
            raise NoSum("it computes with a weight where samples have met")
        self.changes: list[fx.Node] = []
        own: list[fx.Node] = []
        for node in (n for n in graph.graph.nodes if n in tail and n not in self._early):
            # (operations that write are not among the early nodes, nor is what follows from them)
            if not self._early.issuperset(node.all_input_nodes):
                own.append(node)
            elif own:
                raise NoSum(f"{graph.place_of(node)} changes what is made of the inputs, too late")
            else:
                self._early.add(node)
                self.changes.append(node)
        self._refuse(own)
        self._record = _TailRecorder(graph.symbols)
        self._values = dict[fx.Node, Any]()
        self.known: list[fx.Node] = []
        examples: list[Any] = [node.meta.get("example_value") for node in graph.place]
        mode = next(each.fake_mode for each in examples if hasattr(each, "fake_mode"))
        with ExitStack() as stack:
            for context in (as_they_are(), torch.inference_mode(False), modes_restored(), quiet()):
                stack.enter_context(context)
            for context in (mode, mode.shape_env.suppress_guards(), torch.enable_grad()):
                stack.enter_context(context)
            self._taken = [self._given(node, MadeOf.ROWS) for node in taken]
            for node in own:
                self._follow(node)
        self.node = self._only_sum(own, outputs)
        self._result = self._record.number(self._values[self.node])
        self._steps = _needed(self._record.steps, [self._result])
        wanted = {number for step in self._steps for number in step.takes()}
        self._whole = _needed(self._record.known, wanted)
        wanted |= {number for step in self._whole for number in step.takes()}
        # (which are split: by number, where the samples are)
        self._rows = {n: self._record.label(self._record.tensor(n)) for n in wanted}
        self.known = [n for n in self.known if self._record.number(self._values[n]) in wanted]
        self._numbers = [self._record.number(self._values[n]) for n in self.known]
        open_sizes = {s for step in (*self._steps, *self._whole) for s in step.symbols()}
        if not open_sizes.issubset(graph.where_sizes_are):
            raise NoSum("a number that it is given, or reads from a tensor, is part of its loss")
        del self._record, self._values

    def _refuse(self, own: Sequence[fx.Node]) -> None:
        """Check that all operations of the tail can be recorded and run again in parts.

        Args:
            own: nodes of the tail that are not computed from the inputs alone.

        Raises:
            NoSum: an operation takes graphs, switches gradients or autocast, draws random numbers
                or changes tensors.
        """
        graph = self._graph
        modes = {layer.node: open for layer, open in zip(graph.layers, modes_of(graph))}
        layers = {layer.node: layer for layer in graph.layers}
        for node in own:
            effects = layers[node].effects if node in layers else None
            if higher_order_name(node.target) is not None:
                raise NoSum(f"{graph.place_of(node)} is an operation of its own kind")
            if node in modes and modes[node] != OpenModes(gradients=True):
                raise NoSum(f"{graph.place_of(node)} is where gradients or autocast are switched")
            if effects is not None and (effects.random or effects.writes or effects.unknown):
                raise NoSum(f"{graph.place_of(node)} draws random numbers, or changes tensors")

    def _given(self, node: fx.Node, kind: MadeOf) -> int:
        """Record a new tensor in the place of a node that the tail does not compute.

        Args:
            node: the node.
            kind: ``KNOWN``, or ``ROWS`` for results of the heavy part (noted as ``MEET`` if samples
                have no dimension of their own).

        Returns:
            The number of the tensor.
        """
        example = node.meta["example_value"]
        value = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=example.device
        )
        self._values[node] = value
        self._record.set(value, self._followed.label(node))
        if kind is MadeOf.KNOWN:
            self.known.append(node)
            return self._record.know(value)
        is_rows = isinstance(self._followed.label(node), Rows)
        return self._record.take(value, MadeOf.ROWS if is_rows else MadeOf.MEET)

    def _follow(self, node: fx.Node) -> None:
        """Run an operation of the tail on fake tensors, and record it.

        Raises:
            NoSum: it cannot run without values, or takes something that is not known.
        """
        for taken in node.all_input_nodes:
            if taken not in self._values:
                self._find(taken)
        try:
            with self._record:
                self._values[node] = called(node, *arguments_of(node, self._values))
        except FAILURES as error:
            text = str(error).strip().partition("\n")[0]
            raise NoSum(f"{self._graph.place_of(node)} fails without values ({text:.60})") from None

    def _find(self, node: fx.Node) -> None:
        """Set the value of a node that the tail takes and does not compute.

        Raises:
            NoSum: it is not computed from the inputs alone, or is neither a tensor nor a number.
        """
        example = node.meta.get("example_value")
        if isinstance(example, Tensor):
            if node not in self._early:
                raise NoSum(f"{self._graph.place_of(node)} is used where samples have met")
            self._given(node, MadeOf.KNOWN)
        elif node.meta.get("scalar") or node.op == "placeholder":
            self._values[node] = example
        else:
            raise NoSum(f"{self._graph.place_of(node)} is no tensor")

    def _only_sum(self, own: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Node:
        """Find the node of the one scalar Sum that all outputs of the tail are computed from.

        Args:
            own: nodes of the tail that are not computed from the inputs alone.
            outputs: nodes of the tail that the network returns.

        Raises:
            NoSum: there is no such node, outputs have several Sums, or samples meet on another way.
        """
        record, graph = self._record, self._graph
        found: set[int] = set()
        for node in outputs:
            for _, tensor in tensors_in(self._values.get(node, ())):
                if record.kind(tensor) in (MadeOf.MEET, MadeOf.ROWS):
                    raise NoSum(f"samples meet on the way to {graph.place_of(node)}")
                found |= record.sums(tensor)
        if len(found) != 1:
            several = "several sums" if found else "no sum"
            raise NoSum(f"it returns what is made of {several} over samples")
        for node in own:
            value = self._values[node]
            is_sum = isinstance(value, Tensor) and record.kind(value) is MadeOf.SUM
            if is_sum and record.sums(value) == found and value.numel() == 1:
                return node
        raise NoSum("a sum over samples is no scalar, or is taken in an operation")

    def of(self, found: Mapping[fx.Node, Any], values: Sequence[Any]) -> LossOfCall:
        """Compute, for all samples of a call, the Known tensors that shares need.

        Args:
            found: the value of each node of ``known`` in this call; other nodes may be in it too.
            values: the arguments of the captured graph in this call.

        Returns:
            The loss of this call, whose shares can be computed as micro-batches end.
        """
        graph = self._graph
        whole = graph.sizes(graph.bind(values))
        tensors = dict(zip(self._numbers, (found[node] for node in self.known)))
        with torch.no_grad(), _without_autocast():
            for step in self._whole:
                step.run(tensors, whole, whole)
        return LossOfCall(self, tensors, whole)

    def parts_of(
        self, known: Mapping[int, Tensor], samples: Sequence[int], number: int
    ) -> dict[int, Tensor]:
        """Cut Known tensors (computed from inputs alone) down to the samples of one micro-batch.

        Args:
            known: such tensors of the whole batch, by the number that they were recorded under.
            samples: how many samples each micro-batch has.
            number: index of the micro-batch.

        Returns:
            Views by number; a tensor without samples stays whole.
        """
        start, found = sum(samples[:number]), dict[int, Tensor]()
        for key, tensor in known.items():
            rows = self._rows.get(key)
            if isinstance(rows, Rows):
                each = tensor.shape[rows.dim] // sum(samples)
                tensor = tensor.narrow(rows.dim, start * each, samples[number] * each)
            found[key] = tensor
        return found

    def computed(
        self,
        values: dict[int, Tensor],
        outputs: Sequence[Tensor],
        whole: SizesOfSymbols,
        samples: int,
    ) -> Tensor:
        """Compute the share of one micro-batch: a scalar, differentiable by ``outputs``.

        Args:
            values: the Known tensors of the micro-batch from `parts_of`; all else that is computed
                is added.
            outputs: what the heavy part has returned for the micro-batch, in the order of
                ``taken``.
            whole: values of the size symbols in the whole batch.
            samples: how many samples the micro-batch has.
        """
        part = {**whole, **dict.fromkeys(self._graph.symbols, samples)}
        values |= zip(self._taken, outputs, strict=True)
        with torch.enable_grad(), _without_autocast():
            for step in self._steps:
                step.run(values, part, whole)
        return values[self._result]


class LossOfCall:
    """The loss of one call of a network, as the sum of shares of its micro-batches.

    A share has the terms of the samples of one micro-batch.

    Args:
        loss: the loss of the network's graph.
        known: by number, tensors computed from the inputs alone, for the whole batch.
        sizes: values of the size symbols in the whole batch.

    Attributes:
        value: the sum of all shares, set by the code that computes the shares, for the operations
            after the loss; ``None``: shares were not computed.
    """

    def __init__(self, loss: Loss, known: Mapping[int, Tensor], sizes: SizesOfSymbols) -> None:
        self._loss = loss
        self._known = known
        self._sizes = sizes
        self.value: Tensor | None = None

    @property
    def learns(self) -> bool:
        """Whether the loss must give a gradient to something else than the outputs of the stages.

        That is a tensor computed from inputs alone, such as weights of classes that are an input.
        Backwards of shares do not compute its gradient, so backwards must not run inside of the
        call then.
        """
        return any(tensor.requires_grad for tensor in self._known.values())

    def share(self, outputs: Sequence[Tensor], samples: Sequence[int], number: int = 0) -> Tensor:
        """Compute the share of one micro-batch: a scalar, differentiable by ``outputs``.

        The shares of all micro-batches add up to the loss of the call.

        Args:
            outputs: what the heavy part has returned for this micro-batch, in order.
            samples: how many samples each micro-batch has; one number is the whole batch.
            number: index of this micro-batch.
        """
        values = self._loss.parts_of(self._known, samples, number)
        return self._loss.computed(values, outputs, self._sizes, samples[number])


def _without_autocast() -> ExitStack:
    """A context in which autocast is off on all devices.

    Recorded operators are run in it: the casts that autocast makes are among them.
    """
    stack = ExitStack()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack
