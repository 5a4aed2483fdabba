"""A captured network: its layers, what it reads and writes, and what of it depends on the batch.

TorchDynamo hands over an fx graph of torch operations (:mod:`lightning_hybrid.network.capture`).
Its placeholders are parameters, buffers, other tensors and sizes; parameters are arguments like any
other, so what a placeholder is follows from the objects of a call (:class:`NetworkGraph.named`).

Three kinds of nodes are told apart:

* *layers*: operations on tensors, and those that switch a mode. They run once, in order.
* *scalars*: arithmetic on sizes and on numbers that were read from tensors. They are recomputed in
  each stage that needs them.
* *numbers*: scalars that follow from the sizes of the inputs alone. The driver knows them.
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hybrid._torch import (
    guards_hold,
    guards_of,
    higher_order_name,
    is_symbolic,
    symbols_in,
    value_with,
)
from lightning_hybrid.network.annotate import Annotations, Effects, annotate
from lightning_hybrid.network.checkpointing import open_only_region
from lightning_hybrid.network.code import stable

Sizes = Mapping[Any, int]
"""The values of size symbols."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor in the graph.

    Attributes:
        shape: at the captured sizes; empty if it is sparse or nested.
        dtype: its type.
        batched: dimension 0, and no other, is the batch's.
        free: its shape follows from the sizes of the inputs (and not from values).
        is_strided: it is neither sparse nor nested.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool
    free: bool
    is_strided: bool = True

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layer:
    """One operation of the captured network."""

    name: str
    node: fx.Node
    parts: tuple[fx.Node, ...]
    """nodes that take tensors out of what an operation has returned"""
    module: str
    """dotted name of the module whose code calls it; empty: the network's own code, or nobody's"""
    is_module: bool
    """whether that module has no parts: the operation is (a part of) what it computes"""
    parameters: frozenset[str]
    buffers: frozenset[str]
    written: frozenset[str]
    """names of the parameters and buffers that it changes in place"""
    effects: Effects


@dataclass(frozen=True)
class Leaf:
    """A tensor that a call brings: an argument, or what the network's Python holds elsewhere."""

    node: fx.Node
    batched: bool
    """whether dimension 0 is the batch's: then it is split"""
    number: bool = False
    """a Python number that changes between calls, and travels as a tensor"""


@dataclass(eq=False)
class NetworkGraph:
    """A captured network. Made by `of`.

    Attributes:
        network: the module.
        graph: from TorchDynamo.
        layers: its operations in order.
        tensors: per placeholder of a parameter or buffer of the network, its dotted name.
        leaves: what a call brings, in the order that stage 0 takes it.
        numbers: scalar nodes whose values follow from sizes; the driver evaluates them.
        outputs: what the graph returns, in order; a node, or a constant.
        written_leaves: leaves that the network changes in place.
        memory: of each placeholder; see `Effects`.
        symbol: the size that is the batch's; ``None``: no size is free.
        batch: the batch size of the first call.
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
    symbol: Any
    batch: int | None
    attributes: dict[str, Any]
    """constants and nested graphs that nodes name"""
    place: dict[fx.Node, int]
    """per placeholder, its position among the arguments of the graph"""
    info: dict[fx.Node, TensorInfo]
    fingerprint: str
    guards: Any = field(repr=False)
    differentiable: bool = True
    """whether gradients were switched on when it was captured"""

    # ------------------------------------------------------------------ making

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        network: nn.Module,
        names: Sequence[str | None],
        given: set[int],
        values: Sequence[Any],
    ) -> NetworkGraph:
        """Describe what TorchDynamo has captured.

        Args:
            module: from TorchDynamo, with an example value for each node.
            network: the module that was captured.
            names: per placeholder, the name of the parameter or buffer that it is in this call.
            given: identities of the tensors among the arguments of the call.
            values: what the placeholders are in this call.
        """
        return _Describing(module, network, names, given, values).graph()

    # ------------------------------------------------------------------ looking

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The placeholders of what a call brings."""
        return tuple(leaf.node for leaf in self.leaves)

    @cached_property
    def tensor_outputs(self) -> tuple[fx.Node, ...]:
        """What the last stage returns as tensors: outputs, and leaves that were written to."""
        wanted = [n for n in self.outputs if isinstance(n, fx.Node) and n in self.info]
        return tuple(dict.fromkeys([*wanted, *(leaf.node for leaf in self.written_leaves)]))

    @cached_property
    def scalar_outputs(self) -> tuple[fx.Node, ...]:
        """Outputs that are numbers read from tensors."""
        known = {*self.info, *self.numbers}
        return tuple(
            dict.fromkeys(n for n in self.outputs if isinstance(n, fx.Node) and n not in known)
        )

    @cached_property
    def written(self) -> frozenset[str]:
        """Parameters and buffers that a call changes."""
        return frozenset[str]().union(*(layer.written for layer in self.layers))

    @cached_property
    def uses_rng(self) -> bool:
        """Whether a call draws random numbers."""
        return any(layer.effects.random for layer in self.layers)

    @cached_property
    def writes_parameters(self) -> bool:
        """Whether a call changes a parameter (a codebook, an average of weights)."""
        return not self.written.isdisjoint(name for name, _ in self.network.named_parameters())

    @cached_property
    def used(self) -> frozenset[str]:
        """Parameters and buffers that a layer uses."""
        empty = frozenset[str]()
        return empty.union(*(layer.parameters | layer.buffers for layer in self.layers))

    @cached_property
    def made_of_weights(self) -> frozenset[fx.Node]:
        """Parameters, and results of operations on nothing else."""
        parameters = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        found = {node for node, name in self.tensors.items() if name in parameters}
        for node in self.graph.nodes:
            taken = node.all_input_nodes
            if node in self.info and taken and found.issuperset(taken):
                found.add(node)
        return frozenset(found)

    def behind(self, node: fx.Node) -> set[fx.Node]:
        """The tensors, numbers and other layers' results that a node takes, through scalars."""
        found: set[fx.Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting:
            one = waiting.pop()
            if one in found:
                continue
            found.add(one)
            if self.is_scalar(one):
                waiting += one.all_input_nodes
        return found

    def is_scalar(self, node: fx.Node) -> bool:
        """Whether a node is recomputed where it is needed."""
        return bool(node.meta.get("scalar") and not node.meta.get("number"))

    # ------------------------------------------------------------------ a call

    def bind(self, values: Sequence[Any]) -> list[Tensor]:
        """What a call brings, as tensors, from the arguments of the graph."""
        found: list[Tensor] = []
        for leaf in self.leaves:
            value = values[self.place[leaf.node]]
            found.append(torch.tensor(value) if leaf.number else value)
        return found

    def batch_of(self, leaves: Sequence[Tensor]) -> int | None:
        """The batch size of a call, from the tensors of `bind`."""
        sizes = (t.shape[0] for t, leaf in zip(leaves, self.leaves) if leaf.batched)
        return next(sizes, None)

    def sizes(self, leaves: Sequence[Tensor]) -> dict[Any, int]:
        """The values of the size symbols in a call or a micro-batch."""
        return {
            symbol: leaves[number].shape[dimension]
            for symbol, (number, dimension) in self._where_sizes_are.items()
        }

    @cached_property
    def _where_sizes_are(self) -> dict[Any, tuple[int, int]]:
        """Per size symbol the first leaf and dimension that it is the size of."""
        found: dict[Any, tuple[int, int]] = {}
        for number, leaf in enumerate(self.leaves):
            example = leaf.node.meta.get("example_value")
            if isinstance(example, Tensor):
                for dimension, size in enumerate(example.shape):
                    if _is_symbol(size):
                        found.setdefault(symbols_in(size)[0], (number, dimension))
        return found

    def values_of_numbers(self, sizes: Sizes) -> tuple[Any, ...]:
        """What the numbers are for these sizes."""
        return tuple(value_with(node.meta["example_value"], sizes) for node in self.numbers)

    def split(self, leaves: Sequence[Tensor], microbatches: int) -> list[list[Tensor]]:
        """Cut the tensors of `bind` along the batch, like `torch.Tensor.chunk`.

        As with ``chunk`` there may be fewer parts than asked for.
        """
        if self.batch_of(leaves) is None or microbatches == 1:
            return [list(leaves)]
        columns = [
            tensor.chunk(microbatches) if leaf.batched else None
            for tensor, leaf in zip(leaves, self.leaves)
        ]
        count = next(len(column) for column in columns if column is not None)
        return [
            [leaf if column is None else column[i] for leaf, column in zip(leaves, columns)]
            for i in range(count)
        ]

    def guards_allow(self, sizes: Sizes) -> bool:
        """Whether the network's Python takes the same way for other sizes."""
        return guards_hold(self.guards, sizes)

    @property
    def device(self) -> torch.device:
        """Where the network was captured."""
        examples = (node.meta.get("example_value") for node in self.place)
        return next((e.device for e in examples if isinstance(e, Tensor)), torch.device("cpu"))

    @cached_property
    def uncuttable(self) -> str | None:
        """An operation that runs the user's Python later, and so belongs on the driver."""
        for node in self.graph.nodes:
            name = higher_order_name(node.target)
            if name is not None and name not in _TRAVELLING:
                return f"{name} (in {node.name!r})"
        return None

    @cached_property
    def squeezes(self) -> bool:
        """Whether an operation drops all dimensions of size 1, that of a single sample too."""
        for node in self.graph.nodes:
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if name in ("squeeze", "squeeze_") and len(node.args) == 1 and not node.kwargs:
                return True
        return False

    @property
    def is_static(self) -> bool:
        """Whether no size of the batch is free: captured with one sample, or for one size only."""
        return self.symbol is None


class _Describing:
    """Builds one `NetworkGraph`."""

    def __init__(
        self,
        module: fx.GraphModule,
        network: nn.Module,
        names: Sequence[str | None],
        given: set[int],
        values: Sequence[Any],
    ) -> None:
        open_only_region(module)
        self.graph_ = module.graph
        self.network, self.values, self.given = network, values, given
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.place = {node: index for index, node in enumerate(self.placeholders)}
        self.tensors = {n: name for n, name in zip(self.placeholders, names) if name is not None}
        self.attributes = {
            str(n.target): _attribute(module, str(n.target))
            for n in module.graph.nodes
            if n.op == "get_attr"
        }
        self.module_names = {str(id(part)): name for name, part in network.named_modules()}
        # (the weights of a parametrized layer are made by modules inside it)
        modules = network.named_modules()
        self.childless = {
            name for name, part in modules if {*dict(part.named_children())} <= {_MAKES_WEIGHTS}
        }
        self.symbol = self._batch_symbol()
        self.info: dict[fx.Node, TensorInfo] = {}
        self.guards = guards_of(
            [n.meta.get("example_value") for n in self.placeholders if n not in self.tensors]
        )

    def graph(self) -> NetworkGraph:
        for node in self.graph_.nodes:
            self._look_at(node)
        effects = annotate(self.graph_, self.attributes)
        layers = self._layers(effects)
        leaves = self._leaves()
        output = next(n for n in self.graph_.nodes if n.op == "output")
        outputs = output.args[0]
        outputs = tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
        return NetworkGraph(
            self.network,
            self.graph_,
            layers,
            self.tensors,
            leaves,
            tuple(n for n in self.graph_.nodes if n.meta.get("number")),
            outputs,
            tuple(leaf for leaf in leaves if effects.memory.get(leaf.node) in effects.written),
            effects.memory,
            self.symbol,
            self._batch(leaves),
            self.attributes,
            self.place,
            self.info,
            self._fingerprint(),
            self.guards,
            torch.is_grad_enabled(),
        )

    def _batch_symbol(self) -> Any:
        """The size of dimension 0 of the first argument that is a tensor, where it is free."""
        for node in self.placeholders:
            value = self.values[self.place[node]]
            if id(value) in self.given and isinstance(value, Tensor) and value.dim():
                size = node.meta["example_value"].shape[0]
                if not is_symbolic(size):
                    return None
                symbols = symbols_in(size)
                return symbols[0] if len(symbols) == 1 else None
        return None

    def _batch(self, leaves: Sequence[Leaf]) -> int | None:
        for leaf in leaves:
            if leaf.batched:
                return int(self.values[self.place[leaf.node]].shape[0])
        return None

    def _look_at(self, node: fx.Node) -> None:
        example = node.meta.get("example_value")
        if isinstance(example, Tensor):
            self.info[node] = self._info(example)
        elif node.op in ("call_function", "call_method") and _is_scalar(node, example):
            node.meta["scalar"] = True
            node.meta["number"] = self._is_number(example)
        elif node.op == "placeholder":
            node.meta["number"] = self._is_size(node)

    def _info(self, example: Tensor) -> TensorInfo:
        if example.layout is not torch.strided or example.is_nested:
            return TensorInfo((), example.dtype, batched=False, free=False, is_strided=False)
        sizes = list(example.shape)
        batched = bool(sizes) and self._is_batch(sizes[0])
        batched = batched and not any(self._depends(size) for size in sizes[1:])
        known = [value_with(size, {}, hint=True) for size in sizes]
        return TensorInfo(
            tuple(size or 0 for size in known), example.dtype, batched, None not in known
        )

    def _is_batch(self, size: Any) -> bool:
        return self.symbol is not None and _is_symbol(size) and symbols_in(size) == [self.symbol]

    def _depends(self, size: Any) -> bool:
        return self.symbol is not None and is_symbolic(size) and self.symbol in symbols_in(size)

    def _is_size(self, node: fx.Node) -> bool:
        """A number among the placeholders that is the size of a tensor of the call."""
        example = node.meta.get("example_value")
        return is_symbolic(example) and set(symbols_in(example)) <= self._size_symbols()

    def _is_number(self, example: Any) -> bool:
        if not is_symbolic(example):
            return isinstance(example, int | float | bool)
        symbols = set(symbols_in(example))
        return symbols <= self._size_symbols() and value_with(example, {}, hint=True) is not None

    def _size_symbols(self) -> set[Any]:
        if not hasattr(self, "_symbols"):
            self._symbols = {
                symbol
                for node in self.placeholders
                if isinstance(example := node.meta.get("example_value"), Tensor)
                for size in example.shape
                if _is_symbol(size)  # else a call does not tell its value
                for symbol in symbols_in(size)
            }
        return self._symbols

    def _layers(self, effects: Annotations) -> tuple[Layer, ...]:
        parts: dict[fx.Node, list[fx.Node]] = {}
        owner: dict[fx.Node, fx.Node] = {}
        heads: list[fx.Node] = []
        for node in self.graph_.nodes:
            if node.op not in ("call_function", "call_method") or node.meta.get("scalar"):
                continue
            source = node.args[0] if node.args else None
            takes_part = (
                node.target is operator.getitem
                and isinstance(source, fx.Node)
                and (source not in self.info and source in owner)
            )
            if takes_part and isinstance(source, fx.Node):
                owner[node] = owner[source]
                parts[owner[source]].append(node)
            else:
                owner[node] = node
                parts[node] = []
                heads.append(node)
        parameters = {name for name, _ in self.network.named_parameters(remove_duplicate=False)}
        layers = [self._layer(n, tuple(parts[n]), effects, parameters) for n in heads]
        # No cut stands between a switch and the layer beside it. Those of autocast and no_grad
        # go with the layer before, since each stage switches them for itself; others (vmap) with
        # the layer after.
        for index, layer in enumerate(layers):
            if index and self._switches(layer) and layer.effects.ambient:
                layers[index] = _beside(layer, layers[index - 1])
        for index, layer in reversed(list(enumerate(layers[:-1]))):
            if self._switches(layer) and not layer.effects.ambient:
                layers[index] = _beside(layer, layers[index + 1])
        return tuple(layers)

    def _switches(self, layer: Layer) -> bool:
        return layer.node not in self.info and not layer.node.all_input_nodes

    def _layer(
        self,
        node: fx.Node,
        parts: tuple[fx.Node, ...],
        effects: Annotations,
        parameters: set[str],
    ) -> Layer:
        module = self._module_of(node)
        names = {self.tensors[n] for n in node.all_input_nodes if n in self.tensors}
        written = {
            name for n, name in self.tensors.items() if effects.memory[n] in effects.of[node].writes
        }
        return Layer(
            node.name,
            node,
            parts,
            module,
            module in self.childless,
            frozenset(names & parameters),
            frozenset(names - parameters),
            frozenset(written),
            effects.of[node],
        )

    def _module_of(self, node: fx.Node) -> str:
        for key in reversed(list(node.meta.get("nn_module_stack") or ())):
            name: str | None = self.module_names.get(str(key).split("@")[0])
            if name is not None:
                return name.partition(f".{_MAKES_WEIGHTS}.")[0]
        # a region that is checkpointed says it by its weights alone
        used = [self.tensors[n].split(".")[:-1] for n in node.all_input_nodes if n in self.tensors]
        common = itertools.takewhile(lambda column: len({*column}) == 1, zip(*used))
        return ".".join(column[0] for column in common)

    def _leaves(self) -> tuple[Leaf, ...]:
        leaves = []
        for node in self.placeholders:
            if node in self.tensors or node.meta.get("number"):
                continue
            if node in self.info:
                # what the arguments do not hold (a mask kept as an attribute) may be split as well:
                # its size is the batch's only if the code has compared the two
                leaves.append(Leaf(node, self.info[node].batched))
            else:
                leaves.append(Leaf(node, False, number=True))
                node.meta["scalar"] = False
        return tuple(leaves)

    def _fingerprint(self) -> str:
        lines = []
        for node in self.graph_.nodes:
            shape = self.info.get(node)
            target = node.target if isinstance(node.target, str) else stable(node.target)
            if node.op == "placeholder":
                target = self.tensors.get(node, "")
            lines.append(
                f"{node.name} {node.op} {target} {stable(node.args)} "
                f"{stable(dict(node.kwargs))} {shape}"
            )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


_MAKES_WEIGHTS = "parametrizations"


def _beside(layer: Layer, other: Layer) -> Layer:
    return replace(layer, module=other.module, is_module=other.is_module)


def _is_symbol(size: Any) -> bool:
    """Whether a size is one symbol, and not an expression of some."""
    if not is_symbolic(size):
        return False
    symbols = symbols_in(size)
    return len(symbols) == 1 and value_with(size, {symbols[0]: 7919}) == 7919


def _attribute(module: nn.Module, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


_ARITHMETIC = {
    *(vars(operator)[name] for name in operator.__all__ if "item" not in name),
    *(getattr(builtins, name) for name in ("min", "max", "int", "float", "bool", "abs", "round")),
    builtins.len,
    builtins.getattr,
    torch.Size,
    torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite,
    torch.sym_sqrt,
    *(function for function in vars(math).values() if callable(function)),
}  # fmt: skip
_TRAVELLING = {
    *("tag_activation_checkpoint", "wrap_activation_checkpoint", "autograd_function_apply"),
    *("wrap", "wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph", "out_dtype"),
    *("cond", "map", "map_impl", "scan", "associative_scan", "while_loop", "flex_attention"),
}
"""Operations on graphs that mean the same on another rank."""
_LOOKS = {"size", "item", "dim", "numel", "stride", "__len__", "storage_offset"}


def _is_scalar(node: fx.Node, example: Any) -> bool:
    """Whether a call is arithmetic that can be done again wherever it is needed."""
    if example is None or not isinstance(
        example, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool | torch.Size
    ):
        return False
    if node.op == "call_method":
        return node.target in _LOOKS
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and bool(source.meta.get("scalar"))
    return node.target in _ARITHMETIC
