"""From TorchDynamo's graph to a :class:`~lightning_hybrid.graph.graph.NetworkGraph`."""

from __future__ import annotations

import builtins
import hashlib
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hybrid._torch.symbols import captured_value, guards_of, is_symbolic, symbols_in
from lightning_hybrid.graph.graph import Layer, Leaf, NetworkGraph, TensorInfo, is_symbol
from lightning_hybrid.graph.operation_effects import Annotations, Effects, annotate, captured_size
from lightning_hybrid.graph.rows import Rows
from lightning_hybrid.graph.stage_code import held_by, stable


def describe(
    module: fx.GraphModule,
    network: nn.Module,
    names: Sequence[str | None],
    given: Sequence[int],
    values: Sequence[Any],
    shared: frozenset[str],
    batch_dim: int = 0,
) -> NetworkGraph:
    """Make a `NetworkGraph` of what TorchDynamo has captured.

    Must be called in the gradient mode of the call. Whether samples meet is not found out here (see
    `Divided`), so the result says that batches cannot be split.

    Args:
        module: the captured graph, with an example value for each node. Its nodes are marked in
            their ``meta`` ("scalar", "number", "shape").
        network: the module that was captured.
        names: per placeholder, the dotted name of the parameter or buffer that is its value in this
            call; ``None``: it is neither.
        given: the ``id`` of each tensor among the arguments of the network's call, in order.
        values: per placeholder, its value in this call.
        shared: names of the parameters and buffers that exist on all ranks.
        batch_dim: the dimension of the first argument that holds the samples.
    """
    attributes = held_by(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    order = {identity: number for number, identity in enumerate(given)}
    arguments = [
        (order[id(value)], [*zip(node.meta["example_value"].shape, value.shape)])
        for node, value in zip(placeholders, values)
        if id(value) in order and isinstance(value, Tensor) and value.dim() and not value.is_nested
    ]
    arguments.sort(key=lambda argument: argument[0])
    symbols, batch = _of_batch([sizes for _, sizes in arguments], batch_dim)
    tensors = {n: name for n, name in zip(placeholders, names) if name is not None}
    effects = annotate(module.graph, attributes, batch or 1)
    return _Describing(
        module.graph, attributes, network, tensors, shared, symbols, batch
    ).described(effects)


def _of_batch(
    arguments: Sequence[Sequence[tuple[Any, int]]], dim: int
) -> tuple[tuple[Any, ...], int | None]:
    """The size symbols that stand for the batch size, and the batch size in the captured call.

    The batch size is the size in dimension ``dim`` of the first argument where that size is free
    (not fixed by the capture). Since TorchDynamo gives each argument symbols of its own, a free
    size of another argument counts too if it is equal, in dimension ``dim`` or the nearest earlier
    one. (Whether these dimensions hold samples, and whether samples meet, is found out later.)

    Args:
        arguments: per argument, and then per dimension: (size in the graph, its value in this
            call).
        dim: the dimension of the first argument that holds the samples.

    Returns:
        ``(symbols, batch size)``, the symbol of that first argument first; ``((), None)`` if no
        size is free.
    """
    free = [sizes[dim] for sizes in arguments if len(sizes) > dim and is_symbol(sizes[dim][0])]
    same = []
    for sizes in arguments if free else ():
        equal = [s for s, value in sizes[dim::-1] if is_symbol(s) and value == free[0][1]]
        same += equal[:1]
    if free:
        same.sort(key=lambda size: size is not free[0][0])
    symbols = tuple(dict.fromkeys(symbols_in(size)[0] for size in same))
    return symbols, free[0][1] if free else None


def describe_part(
    whole: NetworkGraph, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]
) -> NetworkGraph:
    """Make a `NetworkGraph` of a part of a captured network.

    Args:
        whole: the captured network, of which the effects of all operations are known.
        graph: the part: copies of some operations of ``whole``, and operations that are no copies,
            which must only make new tensors. Its nodes are marked as in `describe`.
        copies: per node of ``whole`` that is in the part, its copy in ``graph``.
    """
    tensors = {copies[n]: name for n, name in whole.tensors.items() if n in copies}
    common = whole.network, tensors, whole.shared, whole.symbols, whole.batch
    effects = _effects_of_part(whole, graph, copies)
    return _Describing(graph, whole.attributes, *common).described(effects)


def _effects_of_part(
    whole: NetworkGraph, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node]
) -> Annotations:
    """The effects of the operations of a part of a captured network.

    A copy has the effects of its original. An operation that is no copy makes one new tensor, whose
    memory gets a new number. The arguments are those of `describe_part`.
    """
    made = {n: copy for n, copy in copies.items() if copy.op != "placeholder"}
    found = Annotations(
        of={made[y.node]: y.effects for y in whole.layers if y.node in made},
        memory={copies[n]: number for n, number in whole.memory.items() if n in copies},
    )
    results = (number for y in whole.layers for number in y.effects.results)
    numbers = itertools.count(1 + max((*whole.memory.values(), *results), default=0))
    copied = set(copies.values())
    for node in graph.nodes:
        if node not in copied and node.op != "output":
            found.memory[node] = next(numbers)
            found.of[node] = Effects(frozenset([found.memory[node]]))
    return found


@dataclass
class _Describing:
    """Builds a `NetworkGraph`: the fields are those of its attributes that are known beforehand.

    Attributes:
        graph, attributes, network, tensors, shared, symbols, batch: as in `NetworkGraph`.
        info: as in `NetworkGraph`; empty until `described` fills it in.
    """

    graph: fx.Graph
    attributes: dict[str, Any]
    network: nn.Module
    tensors: dict[fx.Node, str]
    shared: frozenset[str]
    symbols: tuple[Any, ...]
    batch: int | None
    info: dict[fx.Node, TensorInfo] = field(default_factory=dict)

    def described(self, effects: Annotations) -> NetworkGraph:
        examples = [n.meta.get("example_value") for n in self.placeholders if n not in self.tensors]
        # first, since layers, leaves and the fingerprint depend on the marks that it sets
        for node in self.graph.nodes:
            self._look_at(node)
        layers = self._layers(effects)
        leaves = self._leaves()
        (output,) = self.graph.find_nodes(op="output")
        outputs = output.args[0]
        return NetworkGraph(
            **{each.name: getattr(self, each.name) for each in fields(self)},
            layers=layers,
            leaves=leaves,
            numbers=tuple(n for n in self.graph.nodes if n.meta.get("number")),
            outputs=tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,),
            written_leaves=tuple(
                leaf for leaf in leaves if effects.memory.get(leaf.node) in effects.written
            ),
            memory=effects.memory,
            place={node: index for index, node in enumerate(self.placeholders)},
            fingerprint=self._fingerprint(),
            guards=guards_of(examples),
            differentiable=torch.is_grad_enabled(),
        )

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @cached_property
    def _parameters(self) -> set[str]:
        return {name for name, _ in self.network.named_parameters(remove_duplicate=False)}

    @cached_property
    def _module_names(self) -> dict[str, str]:
        """The dotted name of each module by ``str(id(module))``, TorchDynamo's key for it."""
        return {str(id(part)): name for name, part in self.network.named_modules()}

    @cached_property
    def _childless(self) -> set[str]:
        """The names of modules without submodules other than those that parametrize weights."""
        modules = self.network.named_modules()
        return {
            name for name, part in modules if {*dict(part.named_children())} <= {_MAKES_WEIGHTS}
        }

    @cached_property
    def _size_symbols(self) -> set[Any]:
        """The symbols that are the size of an input tensor, so that a call tells their values."""
        examples = (node.meta.get("example_value") for node in self.placeholders)
        sizes = (size for e in examples if isinstance(e, Tensor) for size in e.shape)
        return {symbol for size in sizes if is_symbol(size) for symbol in symbols_in(size)}

    def _look_at(self, node: fx.Node) -> None:
        example = node.meta.get("example_value")
        if isinstance(example, Tensor):
            self.info[node] = self._info(example)
        elif node.op in ("call_function", "call_method") and _is_scalar(node, example):
            node.meta["scalar"] = True
            node.meta["number"] = self._is_number(example)
            if isinstance(example, torch.Size):
                node.meta["shape"] = all(map(self._is_number, example))
        elif node.op == "placeholder":
            node.meta["number"] = self._is_size(node)

    def _info(self, example: Tensor) -> TensorInfo:
        if example.layout is not torch.strided or example.is_nested:
            return TensorInfo((), example.dtype, free=False, is_strided=False)
        free = None not in map(captured_value, example.shape)
        shape = tuple(captured_size(size, self.batch or 1) for size in example.shape)
        return TensorInfo(shape, example.dtype, free)

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a placeholder is a number that follows from the sizes of input tensors."""
        example = node.meta.get("example_value")
        return is_symbolic(example) and set(symbols_in(example)) <= self._size_symbols

    def _is_number(self, example: Any) -> bool:
        if not is_symbolic(example):
            return isinstance(example, int | float | bool)
        known = set(symbols_in(example)) <= self._size_symbols
        return known and captured_value(example) is not None

    def _layers(self, effects: Annotations) -> tuple[Layer, ...]:
        parts: dict[fx.Node, list[fx.Node]] = {}
        owner: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op not in ("call_function", "call_method") or node.meta.get("scalar"):
                continue
            source: Any = node.args[0] if node.target is operator.getitem else None
            # an operation that returns several tensors is one layer with the nodes that take them
            # out: no cut may lie between, since a tuple cannot be sent
            if isinstance(source, fx.Node) and source not in self.info and source in owner:
                owner[node] = owner[source]
                parts[owner[source]].append(node)
            else:
                owner[node] = node
                parts[node] = []
        layers = [self._layer(node, tuple(taken), effects) for node, taken in parts.items()]
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

    def _layer(self, node: fx.Node, parts: tuple[fx.Node, ...], effects: Annotations) -> Layer:
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
            module in self._childless,
            frozenset(names & self._parameters),
            frozenset(names - self._parameters),
            frozenset(written),
            effects.of[node],
        )

    def _module_of(self, node: fx.Node) -> str:
        for key in reversed(list(node.meta.get("nn_module_stack") or ())):
            name: str | None = self._module_names.get(str(key).split("@")[0])
            if name is not None:
                return name.partition(f".{_MAKES_WEIGHTS}.")[0]
        # a checkpointed region has no such stack: the innermost module with all of its weights
        used = [self.tensors[n].split(".")[:-1] for n in node.all_input_nodes if n in self.tensors]
        common = itertools.takewhile(lambda column: len({*column}) == 1, zip(*used))
        return ".".join(column[0] for column in common)

    def _leaves(self) -> tuple[Leaf, ...]:
        leaves = []
        for node in self.placeholders:
            if node in self.tensors or node.meta.get("number"):
                continue
            if node in self.info:
                # an input that is no argument (a mask kept as an attribute) may be split as well:
                # it has the symbol of the batch size only if the code has compared the two
                leaves.append(Leaf(node, rows_of_input(node, self.symbols)))
            else:
                leaves.append(Leaf(node, None, number=True))
                node.meta["scalar"] = False
        return tuple(leaves)

    def _fingerprint(self) -> str:
        lines = []
        for node in self.graph.nodes:
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


def rows_of_input(node: fx.Node, symbols: Collection[Any]) -> Rows | None:
    """The dimension of the samples in an input, by its shape: the only one with the batch size.

    Args:
        node: a placeholder.
        symbols: the size symbols that stand for the batch size.

    Returns:
        ``None`` if no dimension is exactly the batch size, or several dimensions depend on it.
    """
    example = node.meta["example_value"]
    if not isinstance(example, Tensor) or example.layout is not torch.strided or example.is_nested:
        return None
    # with two dimensions of that size (samples by samples) it cannot be split along either
    sizes = [(d, size) for d, size in enumerate(example.shape) if is_symbolic(size)]
    dims = [(d, size) for d, size in sizes if not set(symbols).isdisjoint(symbols_in(size))]
    return Rows(dims[0][0]) if len(dims) == 1 and is_symbol(dims[0][1]) else None


def _beside(layer: Layer, other: Layer) -> Layer:
    """A copy of ``layer`` that counts as a layer of the module of ``other``.

    A cut between the two would then divide this module, so that other places for it are better.
    """
    return replace(layer, module=other.module, is_module=other.is_module)


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
_LOOKS = {"size", "item", "dim", "numel", "stride", "__len__", "storage_offset"}


def _is_scalar(node: fx.Node, example: Any) -> bool:
    """Whether an operation is arithmetic on numbers, which each stage can repeat for itself.

    Args:
        node: the operation.
        example: its example value, a number or shape if it is arithmetic.
    """
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
