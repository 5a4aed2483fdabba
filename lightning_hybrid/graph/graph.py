"""A captured network: its layers, what it reads and writes, and what of it depends on the batch.

TorchDynamo hands over an fx graph of torch operations (:mod:`lightning_hybrid.capture.capture`).
Its placeholders are parameters, buffers, other tensors and sizes; parameters are arguments like any
other, so which of these a placeholder is, is found by comparing the objects that a call passes.

Three kinds of nodes are told apart:

* *layers*: operations on tensors, and those that switch a mode (autocast). They run once, in order.
* *scalars*: arithmetic on sizes and on numbers that were read from tensors. They are recomputed in
  each stage that needs them.
* *numbers*: scalars that follow from the sizes of the inputs alone. The driver computes them.
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
from lightning_hybrid.graph.annotate import Effects
from lightning_hybrid.graph.rows import Rows
from lightning_hybrid.graph.source_places import input_name

NodeT = TypeVar("NodeT", bound=Hashable)

SizesOfSymbols = Mapping[Any, int]
"""Per symbol of a free size (such as that of the batch), its value in a call."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor in the graph before it is computed.

    Attributes:
        shape: at the captured sizes, with the batch's in the place of one that depends on values;
            empty if it is sparse or nested.
        dtype: its type.
        free: whether its shape follows from the sizes of the inputs (and not from values).
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
        parts: nodes that take tensors out of what the operation has returned.
        module: dotted name of the module whose code calls it; empty: the network itself, or not
            known.
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
    """An input of the graph that a call provides, no parameter or buffer of the network.

    It is an argument of the call, or what the network's Python holds elsewhere (an attribute).

    Attributes:
        node: its placeholder in the graph.
        rows: where the batch's samples are in it, along which it is split; ``None``: all
            micro-batches get it whole.
        number: whether it is a Python number that changes between calls, and travels as a tensor.
        made: whether it is a result of the prologue, which the driver computes for all samples.
    """

    node: fx.Node
    rows: Rows | None
    number: bool = False
    made: bool = False

    @property
    def name(self) -> str:
        """The expression for it in the network's code, such as ``x`` or ``self.mask``."""
        return input_name(self.node)


@dataclass(eq=False)
class NetworkGraph:
    """A captured network. Made by :func:`lightning_hybrid.graph.graph_from_dynamo.describe`.

    Attributes:
        network: the module.
        graph: the fx graph from TorchDynamo.
        layers: its operations in order.
        tensors: per placeholder of a parameter or buffer of the network, its dotted name.
        leaves: the other inputs (but for sizes), in the order in which stage 0 takes them.
        numbers: scalar nodes whose values follow from sizes; the driver evaluates them.
        outputs: what the graph returns, in order; a node, or a constant.
        written_leaves: leaves that the network changes in place.
        memory: per node that is a tensor, the number of its memory; equal numbers mean shared
            memory.
        symbols: the size symbols that stand for the batch size, which may be a symbol of its own
            in each input; empty: the batch size is fixed.
        batch: the batch size of the first call.
        attributes: the constants and nested graphs of ``get_attr`` nodes, by name.
        place: per placeholder, its position among the arguments of the graph.
        info: shape and dtype of every node that is a tensor.
        fingerprint: hash of all nodes with their arguments and shapes, 16 hexadecimal digits.
        guards: what was assumed of the sizes; see `guards_allow`. ``None``: no size is free.
        shared: names of the parameters and buffers of the network that all ranks have.
        differentiable: whether gradients were switched on when it was captured.
        meets: why its batches cannot be split; ``None``: samples do not meet.
        split_by: how it is known that its batches may be split, with the shares of the load that
            prologue and tail have, in a few words: "proof, tail 0.3%".
        tried: operations (with their modules) for which there is no proof that they keep samples
            apart, only a passed trial; see :mod:`lightning_hybrid.graph.row_trial`.
        divided: whether it is the heavy part of a network, whose prologue and tail the driver
            computes.
        rows: per tensor output, where the samples are in it; ``None``: it is the same in all
            micro-batches.
        no_shares: why no micro-batch has a share of a loss by itself, so that no backward may begin
            inside of a call; empty: each has (:mod:`lightning_hybrid.graph.loss_terms`).
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
    tried: tuple[str, ...] = ()
    divided: bool = False
    rows: dict[fx.Node, Rows | None] = field(default_factory=dict)
    no_shares: str = "samples meet in it"

    # ------------------------------------------------------------------ looking

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders of `leaves`."""
        return tuple(leaf.node for leaf in self.leaves)

    @cached_property
    def tensor_outputs(self) -> tuple[fx.Node, ...]:
        """The tensors that the last stage returns: outputs, and leaves changed in place."""
        wanted = [n for n in self.outputs if isinstance(n, fx.Node) and n in self.info]
        return tuple(dict.fromkeys([*wanted, *(leaf.node for leaf in self.written_leaves)]))

    @cached_property
    def sharing_outputs(self) -> frozenset[fx.Node]:
        """Tensor outputs that share memory with another one, or with an input of the graph."""
        made = [n for n in self.tensor_outputs if n in self.memory and n not in self.place]
        counts = Counter(self.memory[n] for n in (*made, *self.place) if n in self.memory)
        return frozenset(node for node in made if counts[self.memory[node]] > 1)

    @cached_property
    def scalar_outputs(self) -> tuple[fx.Node, ...]:
        """Outputs that are numbers read from tensors."""
        # (the driver computes by itself what follows from sizes, without waiting for a stage)
        known = {*self.info, *self.numbers}
        return tuple(
            dict.fromkeys(n for n in self.outputs if isinstance(n, fx.Node) and n not in known)
        )

    @cached_property
    def returns_numbers(self) -> bool:
        """Whether an output is one of `numbers`."""
        return not set(self.numbers).isdisjoint(n for n in self.outputs if isinstance(n, fx.Node))

    @cached_property
    def written(self) -> frozenset[str]:
        """Parameters and buffers that a call changes."""
        return frozenset[str]().union(*(layer.written for layer in self.layers))

    @cached_property
    def uses_rng(self) -> bool:
        """Whether a call draws random numbers, or may."""
        return any(layer.effects.random for layer in self.layers)

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the network's parameters, in its order; of a tied one the first name alone."""
        return tuple(name for name, _ in self.network.named_parameters())

    @cached_property
    def transforms(self) -> bool:
        """Whether functions are transformed in it, as by `torch.vmap`."""
        return any(not layer.effects.ambient for layer in self.layers)

    @cached_property
    def writes_parameters(self) -> bool:
        """Whether a call changes a parameter (a codebook, an average of weights)."""
        return not self.written.isdisjoint(self.parameter_names)

    @cached_property
    def is_checkpointed(self) -> bool:
        """Whether a part is under activation checkpointing."""
        return any(map(is_region, self.graph.nodes))

    @cached_property
    def used(self) -> frozenset[str]:
        """Parameters and buffers that a layer uses."""
        empty = frozenset[str]()
        return empty.union(*(layer.parameters | layer.buffers for layer in self.layers))

    @cached_property
    def made_of_weights(self) -> frozenset[fx.Node]:
        """The nodes that are parameters, or results of operations on nothing but parameters."""
        parameters = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        found = {node for node, name in self.tensors.items() if name in parameters}
        for node in self.graph.nodes:
            taken = node.all_input_nodes
            if node in self.info and taken and found.issuperset(taken):
                found.add(node)
        return frozenset(found)

    def behind(self, node: fx.Node) -> set[fx.Node]:
        """The nodes that a node takes, directly or through scalars, and these scalars."""
        return reached(
            node.all_input_nodes, lambda n: n.all_input_nodes if self.is_scalar(n) else ()
        )

    def place_of(self, node: fx.Node) -> str:
        """The name of a node and of the module that calls it, for messages."""
        layer = next((y for y in self.layers if node is y.node or node in y.parts), None)
        module = f" (of module {layer.module!r})" if layer is not None and layer.module else ""
        return f"{node.name!r}{module}"

    def is_scalar(self, node: fx.Node) -> bool:
        """Whether a node is a scalar that each stage computes for itself, and none of `numbers`."""
        return bool(node.meta.get("scalar") and not node.meta.get("number"))

    # ------------------------------------------------------------------ a call

    def bind(self, values: Sequence[Any]) -> list[Tensor]:
        """The values of `leaves` in a call, as tensors, from the arguments of the graph."""
        # a Python number too: links between ranks send tensors alone
        found: list[Tensor] = []
        for leaf in self.leaves:
            value = values[self.place[leaf.node]]
            found.append(torch.tensor(value) if leaf.number else value)
        return found

    def batch_of(self, leaves: Sequence[Tensor]) -> int | None:
        """The batch size of a call, from the tensors of `bind`.

        ``None`` if no input has one, or if inputs that had the same in the first call differ now.
        """
        found = {leaves[number].shape[dim] for number, dim in self._where_batch_is}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _where_batch_is(self) -> list[tuple[int, int]]:
        """The number of each leaf that has the batch size, with the dimension that has it."""
        found = []
        for number, leaf in enumerate(self.leaves):
            if leaf.rows is not None:
                size = leaf.node.meta["example_value"].shape[leaf.rows.dim]
                if is_symbol(size) and symbols_in(size)[0] in self.symbols:
                    found.append((number, leaf.rows.dim))
        return found

    def sizes(self, leaves: Sequence[Tensor]) -> dict[Any, int]:
        """The values of the size symbols in a call or a micro-batch."""
        return {
            symbol: leaves[number].shape[dimension]
            for symbol, (number, dimension) in self.where_sizes_are.items()
        }

    @cached_property
    def where_sizes_are(self) -> dict[Any, tuple[int, int]]:
        """Per size symbol a leaf and dimension that it is the size of: the first that is split.

        If none is, the first one. (Of a micro-batch a matrix of samples by samples is still whole.)
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
        """The values of `numbers` for these sizes."""
        return tuple(value_with(node.meta["example_value"], sizes) for node in self.numbers)

    def given(self, values: Sequence[Any]) -> dict[fx.Node, Any]:
        """The values in a call of nodes that need no computation: inputs, what follows from sizes.

        Args:
            values: the arguments of the graph.
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
        """The nodes that are shapes, and follow from the sizes of the inputs."""
        return [node for node in self.graph.nodes if node.meta.get("shape")]

    def split(self, leaves: Sequence[Tensor], microbatches: int) -> list[list[Tensor]]:
        """Cut the tensors of `bind` along the batch, like `torch.Tensor.chunk`.

        As with ``chunk`` there may be fewer parts than asked for.
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
        """What the graph returns, from the last stage's outputs and the values of `numbers`.

        These may be left out unless `returns_numbers`.
        """
        found = dict(zip((*self.tensor_outputs, *self.scalar_outputs), outputs, strict=True))
        found |= zip(self.numbers, numbers)
        return [found[n] if isinstance(n, fx.Node) else n for n in self.outputs]

    def guards_allow(self, sizes: SizesOfSymbols) -> bool:
        """Whether the conditions on sizes under which it was captured hold for these sizes."""
        return guards_hold(self.guards, sizes)

    @property
    def device(self) -> torch.device:
        """The device that the network was captured on: the CPU only if no input is elsewhere."""
        examples = (node.meta.get("example_value") for node in self.place)
        devices = (e.device for e in examples if isinstance(e, Tensor))
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    @cached_property
    def uncuttable(self) -> str | None:
        """The first operation that may run the user's Python later, which only the driver can."""
        for node in self.graph.nodes:
            name = higher_order_name(node.target)
            if name is not None and name not in _TRAVELLING:
                return f"{name} (in {node.name!r})"
        return None

    @cached_property
    def needs_two_samples(self) -> fx.Node | None:
        """The first operation that a single sample cannot go through, or not as several do.

        It drops all dimensions of size 1, that of the batch too; or it is batch normalisation in
        training of one value per channel and sample.
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
    def symbol(self) -> Any:
        """A size symbol that stands for the batch size; ``None``: the batch size is fixed."""
        return self.symbols[0] if self.symbols else None

    @property
    def is_static(self) -> bool:
        """Whether no size of the batch is free: captured with one sample, or for one size only."""
        return not self.symbols


def reached(start: Iterable[NodeT], following: Callable[[NodeT], Iterable[NodeT]]) -> set[NodeT]:
    """All nodes that can be reached from the nodes ``start``, which are among them.

    Args:
        start: where to begin.
        following: gives the nodes that are one step from a node.
    """
    found = set(start)
    waiting = list(found)  # not by recursion: networks are deep
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def why_whole(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    """Why a batch must go through the network as a whole; ``None``: it may be split.

    Args:
        graph: the captured network.
        leaves: the tensors of a call; see `NetworkGraph.bind`.
        microbatches: their number, as in `torch.Tensor.chunk`.
    """
    if graph.is_static:
        return "its code was captured for one batch size only"
    if graph.meets is not None:
        return graph.meets
    return _misfit(graph, leaves, microbatches)


def fits(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> bool:
    """Whether the captured graph also holds for micro-batches of the sizes that result."""
    return _misfit(graph, leaves, microbatches) is None


def _misfit(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    """Why the captured graph does not hold for the micro-batches of a batch; ``None``: it does."""
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
    """The micro-batches' parts of a tensor; each requires a gradient if the tensor does.

    Where gradients are switched off, torch gives a view the ``requires_grad`` of the tensor that
    owns the memory, which can differ from that of ``tensor`` if ``tensor`` is a view itself.
    """
    parts = slices(tensor, rows, sizes)
    if all(part.requires_grad == tensor.requires_grad for part in parts):
        return parts
    return [part.detach().requires_grad_(tensor.requires_grad) for part in parts]


def is_symbol(size: Any) -> bool:
    """Whether a size is one symbol, and not an expression of some."""
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
    """The micro-batches' parts of a tensor.

    Args:
        tensor: of the whole batch.
        rows: where its samples are; ``outer`` is 1.
        sizes: how many samples each micro-batch has.

    Returns:
        Views.
    """
    each = tensor.shape[rows.dim] // sum(sizes)
    return list(tensor.split([size * each for size in sizes], rows.dim))


def joined(parts: Sequence[Tensor], rows: Rows) -> Tensor:
    """The tensor of a whole batch from those of its micro-batches, the reverse of `slices`.

    Its dimensions have the order in memory that those of the first part have.
    """
    first, dim = parts[0], rows.dim
    if first.is_contiguous() or first.layout is not torch.strided:
        return torch.cat(list(parts), dim)
    strides = first.stride()
    order = sorted(range(first.dim()), key=lambda d: (-strides[d], d))
    size = list(first.shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    # (no view, which would require a gradient only if the tensor behind it does)
    whole = torch.empty_permuted(size, order, dtype=first.dtype, device=first.device)
    permuted = [part.permute(order) for part in parts]
    torch.cat(permuted, order.index(dim), out=whole.permute(order))
    return whole
