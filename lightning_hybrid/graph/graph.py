"""A captured network: its layers, what it reads and writes, and what of it depends on the batch.

TorchDynamo hands over an fx graph of torch operations (:mod:`lightning_hybrid.capture.capture`).
Its placeholders are parameters, buffers, other tensors and sizes. The graph does not tell which of
these a placeholder is: that is found by comparing the objects that a call passes with the
parameters and buffers of the network.

Three kinds of nodes are told apart:

* *layers*: operations on tensors, and those that switch a mode (autocast). They run once, in order.
* *scalars*: arithmetic on sizes and on numbers that were read from tensors. They are recomputed in
  each stage that needs them.
* *numbers*: scalars that follow from the sizes of the inputs alone. The driver computes them, for
  all stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_hybrid._torch.graphs import higher_order_name, is_region
from lightning_hybrid._torch.symbols import guards_hold, is_symbolic, symbols_in, value_with
from lightning_hybrid.graph.operation_effects import Effects
from lightning_hybrid.graph.rows import Rows
from lightning_hybrid.graph.source_places import input_name

NodeT = TypeVar("NodeT", bound=Hashable)

SizesOfSymbols = Mapping[Any, int]
"""The value of each size symbol in one call or micro-batch.

A size symbol stands for a size that the capture has left open, such as the batch size.
"""


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a tensor in the graph, known before the tensor is computed.

    Attributes:
        shape: the shape in the captured call; where a size depends on values of tensors, the batch
            size stands for it. Empty for a sparse or nested tensor.
        dtype: its type.
        free: whether its shape follows from the sizes of the inputs alone (and not from values).
        is_strided: whether it is neither sparse nor nested.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    free: bool
    is_strided: bool = True

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layer:
    """One operation of the captured network.

    Attributes:
        name: the name of its node.
        node: the operation in the captured graph.
        parts: ``getitem`` nodes that take single tensors out of the tuple that the operation
            returns.
        module: dotted name of the module whose code calls the operation; empty: the network itself,
            or not known.
        is_module: whether that module has no submodules, so that the operation is (a part of) what
            the module computes.
        parameters: names of the parameters that it is given.
        buffers: names of the buffers that it is given.
        written: names of the parameters and buffers that it changes in place.
        effects: which memory it writes and shares, whether it is random; see `Effects`.
    """

    name: str
    node: fx.Node
    parts: tuple[fx.Node, ...]
    module: str
    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str]
    written: frozenset[str]
    effects: Effects


@dataclass(frozen=True)
class Leaf:
    """An input of the graph, given in each call, that is no parameter and no buffer of the network.

    It is an argument of the call, or a value that the network's Python reads from elsewhere (an
    attribute).

    Attributes:
        node: its placeholder in the graph.
        rows: the dimension of the batch's samples, along which the value is split; ``None``: every
            micro-batch gets the whole value.
        number: whether it is a Python number that changes between calls; it is sent as a tensor.
        made: whether the prologue computes it, on the driver and for all samples; else it comes
            with the call.
    """

    node: fx.Node
    rows: Rows | None
    number: bool = False
    made: bool = False

    @property
    def name(self) -> str:
        """The expression for this input in the network's code, such as ``x`` or ``self.mask``."""
        return input_name(self.node)


@dataclass(eq=False)
class NetworkGraph:
    """A captured network. Made by :func:`lightning_hybrid.graph.graph_from_dynamo.describe`.

    Attributes:
        network: the module that was captured.
        graph: the fx graph from TorchDynamo.
        layers: its operations in order.
        tensors: per placeholder of a parameter or buffer of the network, its dotted name.
        leaves: the other inputs (without sizes), in the order in which stage 0 takes them.
        numbers: nodes of numbers that follow from the sizes of the inputs alone, in the order of
            the graph; the driver evaluates them.
        outputs: what the graph returns, in order: each a node, or a constant.
        written_leaves: leaves that the network changes in place.
        memory: per node that is a tensor, the number of the memory that it lies in; nodes with
            equal numbers share memory.
        symbols: the size symbols that stand for the batch size, that of the first input first (each
            input may have a symbol of its own); empty: the batch size is fixed.
        batch: the batch size of the call that was captured; ``None``: no size of the batch is free.
        attributes: the values of ``get_attr`` nodes (constants, nested graphs), by name.
        place: per placeholder, its position among the arguments of the graph.
        info: shape and type of every node that is a tensor.
        fingerprint: hash of all nodes with their arguments and shapes, 16 hexadecimal digits.
        guards: the conditions on sizes under which the graph holds; see `guards_allow`. ``None``:
            no size is free.
        shared: names of the parameters and buffers of the network that exist on all ranks.
        differentiable: whether gradients were switched on when it was captured.
        meets: why its batches cannot be split into micro-batches (a result depends on several
            samples), as a clause; ``None``: they can.
        split_by: how it is known that its batches may be split, with the shares of the load that
            prologue and tail have, in a few words: "proof, tail 0.3%".
        divided: whether this is the heavy part of a network, whose prologue and tail the driver
            computes; see :mod:`lightning_hybrid.graph.three_parts`.
        rows: per node of `tensor_outputs`, the dimension of the samples; ``None``: the output is
            the same in all micro-batches.
        no_shares: why a micro-batch cannot compute its share of the loss by itself, as a clause, so
            that no backward may run inside of the call; empty: each micro-batch can
            (:mod:`lightning_hybrid.graph.loss_terms`). `1f1b` needs that.
    """

    network: nn.Module
    graph: fx.Graph
    layers: tuple[Layer, ...]
    tensors: dict[fx.Node, str]
    leaves: tuple[Leaf, ...]
    numbers: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    written_leaves: tuple[Leaf, ...]
    memory: dict[fx.Node, int]
    symbols: tuple[Any, ...]
    batch: int | None
    attributes: dict[str, Any]
    place: dict[fx.Node, int]
    info: dict[fx.Node, TensorInfo]
    fingerprint: str
    guards: Any = field(repr=False)
    shared: frozenset[str]
    differentiable: bool = True
    meets: str | None = "it was not followed whether its samples meet"
    split_by: str = ""
    divided: bool = False
    rows: dict[fx.Node, Rows | None] = field(default_factory=dict)
    no_shares: str = "samples meet in it"

    # ------------------------------------------------------------------ looking

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders of `leaves`, in the same order."""
        return tuple(leaf.node for leaf in self.leaves)

    @cached_property
    def tensor_outputs(self) -> tuple[fx.Node, ...]:
        """Nodes whose tensors the last stage returns: tensors in `outputs`, then `written_leaves`.

        Each node is listed once.
        """
        wanted = [n for n in self.outputs if isinstance(n, fx.Node) and n in self.info]
        return tuple(dict.fromkeys([*wanted, *(leaf.node for leaf in self.written_leaves)]))

    @cached_property
    def sharing_outputs(self) -> frozenset[fx.Node]:
        """Nodes of `tensor_outputs` that share memory with another output or an input.

        Inputs that are returned themselves are not among them.
        """
        made = [n for n in self.tensor_outputs if n in self.memory and n not in self.place]
        counts = Counter(self.memory[n] for n in (*made, *self.place) if n in self.memory)
        return frozenset(node for node in made if counts[self.memory[node]] > 1)

    @cached_property
    def scalar_outputs(self) -> tuple[fx.Node, ...]:
        """Nodes of `outputs` that are numbers read from tensors, in order, each once."""
        # (the driver computes by itself what follows from sizes, without waiting for a stage)
        known = {*self.info, *self.numbers}
        return tuple(
            dict.fromkeys(n for n in self.outputs if isinstance(n, fx.Node) and n not in known)
        )

    @cached_property
    def returns_numbers(self) -> bool:
        """Whether an output is one of `numbers` (which follow from the sizes of the inputs)."""
        return not set(self.numbers).isdisjoint(n for n in self.outputs if isinstance(n, fx.Node))

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the parameters and buffers that a call changes in place."""
        return frozenset[str]().union(*(layer.written for layer in self.layers))

    @cached_property
    def uses_rng(self) -> bool:
        """Whether a call draws random numbers; true also where that is not known."""
        return any(layer.effects.random for layer in self.layers)

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the network's parameters, in its order; of a tied one the first name alone."""
        return tuple(name for name, _ in self.network.named_parameters())

    @cached_property
    def transforms(self) -> bool:
        """Whether a layer lies inside of ``vmap``, forward-mode derivatives or inference mode."""
        return any(not layer.effects.ambient for layer in self.layers)

    @cached_property
    def writes_parameters(self) -> bool:
        """Whether a call changes a parameter in place (a codebook, an average of weights)."""
        return not self.written.isdisjoint(self.parameter_names)

    @cached_property
    def is_checkpointed(self) -> bool:
        """Whether a part of the network runs under activation checkpointing."""
        return any(map(is_region, self.graph.nodes))

    @cached_property
    def used(self) -> frozenset[str]:
        """Names of the parameters and buffers that the layers take."""
        empty = frozenset[str]()
        return empty.union(*(layer.parameters | layer.buffers for layer in self.layers))

    @cached_property
    def made_of_weights(self) -> frozenset[fx.Node]:
        """Nodes that are parameters, or tensors computed from nothing but parameters."""
        parameters = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        found = {node for node, name in self.tensors.items() if name in parameters}
        for node in self.graph.nodes:
            taken = node.all_input_nodes
            if node in self.info and taken and found.issuperset(taken):
                found.add(node)
        return frozenset(found)

    def inputs_through_scalars(self, node: fx.Node) -> set[fx.Node]:
        """The inputs of a node, and recursively the inputs of those inputs that are scalars.

        Each stage recomputes the scalars (see `is_scalar`) that a node takes, and so needs their
        inputs too.
        """
        return reached(
            node.all_input_nodes, lambda n: n.all_input_nodes if self.is_scalar(n) else ()
        )

    def place_of(self, node: fx.Node) -> str:
        """A node in the words of messages: "'conv2d' (of module 'stem.conv')".

        The module is the one whose code calls the node; it is left out if it is not known.
        """
        layer = next((y for y in self.layers if node is y.node or node in y.parts), None)
        module = f" (of module {layer.module!r})" if layer is not None and layer.module else ""
        return f"{node.name!r}{module}"

    def is_scalar(self, node: fx.Node) -> bool:
        """Whether a node is a number that each stage computes itself, where it needs it.

        Those in `numbers`, which the driver computes, are not.
        """
        return bool(node.meta.get("scalar") and not node.meta.get("number"))

    # ------------------------------------------------------------------ a call

    def bind(self, values: Sequence[Any]) -> list[Tensor]:
        """Pick the values of `leaves` from the arguments of the graph, as tensors.

        Args:
            values: all arguments of the graph in one call, in the order of its placeholders.

        Returns:
            One tensor per leaf, in order; a Python number becomes a scalar tensor.
        """
        # a Python number too: links between ranks send tensors alone
        found: list[Tensor] = []
        for leaf in self.leaves:
            value = values[self.place[leaf.node]]
            found.append(torch.tensor(value) if leaf.number else value)
        return found

    def batch_of(self, leaves: Sequence[Tensor]) -> int | None:
        """The number of samples in the tensors of a call (from `bind`) or of a micro-batch.

        ``None`` if no leaf has a dimension of the batch size, or if leaves whose batch sizes were
        equal in the captured call have different ones now.
        """
        found = {leaves[number].shape[dim] for number, dim in self._where_batch_is}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _where_batch_is(self) -> list[tuple[int, int]]:
        """For each leaf whose size is the batch size: (index in `leaves`, dimension)."""
        found = []
        for number, leaf in enumerate(self.leaves):
            if leaf.rows is not None:
                size = leaf.node.meta["example_value"].shape[leaf.rows.dim]
                if is_symbol(size) and symbols_in(size)[0] in self.symbols:
                    found.append((number, leaf.rows.dim))
        return found

    def sizes(self, leaves: Sequence[Tensor]) -> dict[Any, int]:
        """The values of the size symbols in a call or a micro-batch.

        Args:
            leaves: the tensors of `bind`, or a micro-batch's parts of them.
        """
        return {
            symbol: leaves[number].shape[dimension]
            for symbol, (number, dimension) in self.where_sizes_are.items()
        }

    @cached_property
    def where_sizes_are(self) -> dict[Any, tuple[int, int]]:
        """Where to read the value of each size symbol: per symbol (index in `leaves`, dimension).

        It is the first place in a leaf that is split into micro-batches, or else the first place at
        all: a leaf that is not split, such as a matrix of samples by samples, has the size of the
        whole batch also in a micro-batch.
        """
        found: dict[Any, tuple[int, int]] = {}
        for number, leaf in sorted(enumerate(self.leaves), key=lambda each: each[1].rows is None):
            example = leaf.node.meta.get("example_value")
            if isinstance(example, Tensor):
                for dimension, size in enumerate(example.shape):
                    if is_symbol(size):
                        found.setdefault(symbols_in(size)[0], (number, dimension))
        return found

    def values_of_numbers(self, sizes: SizesOfSymbols) -> tuple[Any, ...]:
        """The values of `numbers`, in order.

        Args:
            sizes: the values of the size symbols, as the method `sizes` returns them.
        """
        return tuple(value_with(node.meta["example_value"], sizes) for node in self.numbers)

    def given(self, values: Sequence[Any]) -> dict[fx.Node, Any]:
        """The values in a call of all nodes that need no computation on tensors.

        These are the inputs, and the numbers and shapes that follow from the sizes of the inputs.

        Args:
            values: the arguments of the graph in this call, in the order of its placeholders.

        Returns:
            Per node its value.
        """
        sizes = self.sizes(self.bind(values))
        found = {node: values[place] for node, place in self.place.items()}
        found |= zip(self.numbers, self.values_of_numbers(sizes))
        for node in self._shapes:
            shape = node.meta["example_value"]
            found[node] = torch.Size(value_with(size, sizes) for size in shape)
        return found

    @cached_property
    def _shapes(self) -> list[fx.Node]:
        """The nodes that are shapes (``torch.Size``) computed from the sizes of inputs alone."""
        return [node for node in self.graph.nodes if node.meta.get("shape")]

    def split(self, leaves: Sequence[Tensor], microbatches: int) -> list[list[Tensor]]:
        """Split the tensors of `bind` into micro-batches, sized as by `torch.Tensor.chunk`.

        Args:
            leaves: the tensors of a call. It is not checked that the batch may be split: see
                `why_whole`.
            microbatches: how many are wanted; as with ``chunk`` there may be fewer.

        Returns:
            Per micro-batch a list of tensors in the order of `leaves`: views of some samples, or
            the whole tensor where a leaf has no samples. There is one micro-batch if the batch size
            is not known (see `batch_of`).
        """
        batch = self.batch_of(leaves)
        if batch is None or microbatches == 1:
            return [list(leaves)]
        most = -(-batch // microbatches)  # rounded up, as `chunk` does
        sizes = [min(most, batch - start) for start in range(0, batch, most)]
        columns = [
            [tensor] * len(sizes) if leaf.rows is None else _parts(tensor, leaf.rows, sizes)
            for tensor, leaf in zip(leaves, self.leaves)
        ]
        return list(map(list, zip(*columns)))

    def returned(self, outputs: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """Put together what the graph returns, in the order of its `outputs`.

        Args:
            outputs: what the last stage returns: the values of `tensor_outputs`, then
                `scalar_outputs`.
            numbers: the values of `numbers`; empty is enough unless `returns_numbers`.
        """
        found = dict(zip((*self.tensor_outputs, *self.scalar_outputs), outputs, strict=True))
        found |= zip(self.numbers, numbers)
        return [found[n] if isinstance(n, fx.Node) else n for n in self.outputs]

    def guards_allow(self, sizes: SizesOfSymbols) -> bool:
        """Whether the graph holds for these sizes: they meet the conditions of the capture."""
        return guards_hold(self.guards, sizes)

    @property
    def device(self) -> torch.device:
        """The device of the capture: that of the first input outside of the CPU, else the CPU."""
        examples = (node.meta.get("example_value") for node in self.place)
        devices = (e.device for e in examples if isinstance(e, Tensor))
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    @cached_property
    def uncuttable(self) -> str | None:
        """The first operation that may call the user's Python; ``None``: no operation may.

        The text is for messages: its name, and in brackets that of its node. Such an operation (one
        that takes functions, for instance) calls the user's Python each time it runs. Only the
        driver has that Python, so the network cannot be cut into stages.
        """
        for node in self.graph.nodes:
            name = higher_order_name(node.target)
            if name is not None and name not in _TRAVELLING:
                return f"{name} (in {node.name!r})"
        return None

    @cached_property
    def needs_two_samples(self) -> fx.Node | None:
        """The first operation that a single sample cannot go through as several do.

        It is a ``squeeze`` of all dimensions of size 1, which would drop that of the batch too, or
        batch normalisation in training of one value per channel and sample. ``None``: there is
        none.
        """
        nested = (
            m for v in self.attributes.values() if isinstance(v, nn.Module) for m in v.modules()
        )
        graphs = [self.graph, *(m.graph for m in nested if isinstance(m, fx.GraphModule))]
        for node in (node for graph in graphs for node in graph.nodes):
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if name in ("squeeze", "squeeze_") and len(node.args) + len(node.kwargs) == 1:
                return cast(fx.Node, node)
            if node.target is F.batch_norm and _normalises_one_value(node):
                return cast(fx.Node, node)
        return None

    @property
    def is_static(self) -> bool:
        """Whether the graph holds for one batch size only (as when captured with one sample)."""
        return not self.symbols


def reached(start: Iterable[NodeT], following: Callable[[NodeT], Iterable[NodeT]]) -> set[NodeT]:
    """All nodes that can be reached from the nodes ``start``, these included.

    Args:
        start: where to begin.
        following: returns the nodes that are one step from a node.
    """
    found = set(start)
    waiting = list(found)  # not by recursion: networks are deep
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def why_whole(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    """Why a batch must not be split into micro-batches; ``None``: it may be split.

    The text is a clause, such as "its inputs have several batch sizes".

    Args:
        graph: the captured network.
        leaves: the tensors of a call, from `NetworkGraph.bind`.
        microbatches: how many are wanted; as with `torch.Tensor.chunk` there may be fewer.
    """
    if graph.is_static:
        return "its code was captured for one batch size only"
    if graph.meets is not None:
        return graph.meets
    return _misfit(graph, leaves, microbatches)


def fits(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> bool:
    """Whether the captured graph also holds for the micro-batches that a batch is split into.

    (Whether samples meet in it is not looked at; see `why_whole`.)

    Args:
        graph: the captured network.
        leaves: the tensors of a call, from `NetworkGraph.bind`.
        microbatches: how many are wanted; as with `torch.Tensor.chunk` there may be fewer.
    """
    return _misfit(graph, leaves, microbatches) is None


def _misfit(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    """Why the graph does not hold for the parts of a batch, as a clause; ``None``: it does.

    For the arguments see `fits`.
    """
    if graph.batch_of(leaves) is None:
        return "its inputs have several batch sizes"
    parts = graph.split(leaves, microbatches)
    alone = any(graph.batch_of(part) == 1 for part in parts)
    if alone and (node := graph.needs_two_samples) is not None:
        return f"{graph.place_of(node)} needs two samples, and a part has one"
    if not all(graph.guards_allow(graph.sizes(part)) for part in parts):
        return "its code takes another way for other batch sizes"
    return None


def _parts(tensor: Tensor, rows: Rows, sizes: Sequence[int]) -> list[Tensor]:
    """Split a tensor into the parts of micro-batches, with the ``requires_grad`` of the tensor.

    Where gradients are switched off, torch gives a view the ``requires_grad`` of the tensor that
    owns the memory, which can differ from that of ``tensor`` if ``tensor`` is a view itself: then
    the parts are detached.

    Args:
        tensor: of the whole batch.
        rows: the dimension of its samples; its ``outer`` must be 1.
        sizes: how many samples each micro-batch has, together all samples.
    """
    parts = slices(tensor, rows, sizes)
    if all(part.requires_grad == tensor.requires_grad for part in parts):
        return parts
    return [part.detach().requires_grad_(tensor.requires_grad) for part in parts]


def is_symbol(size: Any) -> bool:
    """Whether a size is a single symbol: neither a number nor an expression such as ``2 * s``."""
    if not is_symbolic(size):
        return False
    symbols = symbols_in(size)
    # an expression of one symbol gives another number for some large prime
    return len(symbols) == 1 and value_with(size, {symbols[0]: 7919}) == 7919


_TRAVELLING = {
    "tag_activation_checkpoint",
    "wrap_activation_checkpoint",
    "autograd_function_apply",
    "wrap",
    "wrap_with_set_grad_enabled",
    "wrap_with_autocast",
    "invoke_subgraph",
    "out_dtype",
    "cond",
    "map",
    "map_impl",
    "scan",
    "associative_scan",
    "while_loop",
    "flex_attention",
}
"""Operators that take graphs and that any rank can compute: they run none of the user's Python."""


def _normalises_one_value(node: fx.Node) -> bool:
    training = node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False)
    example = cast(fx.Node, node.args[0]).meta.get("example_value")
    if example is None:
        return False
    one = all(isinstance(size, int) and size == 1 for size in example.shape[2:])
    return bool(training) and one and is_symbol(example.shape[0])


def slices(tensor: Tensor, rows: Rows, sizes: Sequence[int]) -> list[Tensor]:
    """Split a tensor of the whole batch into the parts of micro-batches.

    Args:
        tensor: of the whole batch.
        rows: the dimension of its samples; its ``outer`` must be 1.
        sizes: how many samples each micro-batch has, together all samples.

    Returns:
        One view per micro-batch, in order.
    """
    each = tensor.shape[rows.dim] // sum(sizes)
    return list(tensor.split([size * each for size in sizes], rows.dim))


def joined(parts: Sequence[Tensor], rows: Rows) -> Tensor:
    """Join the tensors of micro-batches into that of the whole batch, the reverse of `slices`.

    The dimensions of the result lie in memory in the same order as those of the first part.

    Args:
        parts: one tensor per micro-batch, in order.
        rows: the dimension of their samples; its ``outer`` must be 1.
    """
    first, dim = parts[0], rows.dim
    if first.is_contiguous() or first.layout is not torch.strided:
        return torch.cat(list(parts), dim)
    strides = first.stride()
    order = sorted(range(first.dim()), key=lambda d: (-strides[d], d))
    size = list(first.shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    # (no view, which would require a gradient only if the tensor that it views does)
    whole = torch.empty_permuted(size, order, dtype=first.dtype, device=first.device)
    permuted = [part.permute(order) for part in parts]
    torch.cat(permuted, order.index(dim), out=whole.permute(order))
    return whole
