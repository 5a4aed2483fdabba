"""A traced network: its layers, and how a call of it becomes a list of tensors and back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network.merge import Value
from lightning_hybrid.network.structure import (
    Token,
    first_difference,
    flatten,
    rebuild,
    spelled,
    tensors_in,
)

# ---------------------------------------------------------------- functions that graphs call


def size_from(anchor: Tensor, dim: int, numerator: int, denominator: int, offset: int) -> int:
    """A number that depends on the batch size, from a tensor that shows the batch size."""
    return anchor.shape[dim] * numerator // denominator + offset


def device_of(anchor: Tensor) -> torch.device:
    """The device that a stage runs on."""
    return anchor.device


def by_mode(training: bool, while_training: Any, while_not: Any) -> Any:
    """A constant that depends on ``module.training``."""
    return while_training if training else while_not


ANCHORED = (size_from, device_of)
"""Functions whose first argument may be any tensor that shows the batch size."""


def all_inputs(node: fx.Node) -> set[fx.Node]:
    """The node's inputs, and theirs as far as they are pure and bound to these very tensors."""
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            if one.meta.get("pure") and one.target not in ANCHORED:
                waiting += one.all_input_nodes
    return found


# ---------------------------------------------------------------- the inputs of a call


def batch_size(tensors: Sequence[Tensor]) -> int | None:
    """The size of the first tensor that has a dimension; None when there is none."""
    return next((t.shape[0] for t in tensors if t.dim() > 0), None)


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """A key of a call: equal keys mean that the same graph is right for both calls.

    Holds the structure of the arguments, everything in them that is not a tensor, the type and size
    of the tensors except for the batch size, and the state of autocast.
    """
    tensors: list[Tensor] = []
    key = flatten((args, dict(kwargs)), tensors)
    return key, _sizes(tensors)


def _sizes(tensors: Sequence[Tensor]) -> Hashable:
    batch = batch_size(tensors)
    sizes = tuple(
        (t.dtype, ("B", *t.shape[1:]) if t.dim() and t.shape[0] == batch else tuple(t.shape))
        for t in tensors
    )
    return sizes, autocast_dtype(tensors[0].device) if tensors else None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The type that autocast computes in at this moment; None: it is off."""
    kind = "cpu" if device.type == "meta" else device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The same arguments with descriptions (tensors on the meta device) for tensors; they pickle.

    A rank that traces the network with descriptions gets the same graph.
    """

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return rebuild(args, leaf), rebuild(dict(kwargs), leaf)


# ---------------------------------------------------------------- the graph


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments."""

    dtype: torch.dtype
    size: tuple[int, ...]
    batched: bool
    """whether its first size is the batch's, and so may change"""

    def fits(self, tensor: Tensor, batch: int | None) -> bool:
        """Whether a tensor may take its place in a call with another batch size."""
        if tensor.dtype != self.dtype or len(self.size) != tensor.dim():
            return False
        if not self.batched:
            return tuple(tensor.shape) == self.size
        return tensor.shape[0] == batch and tuple(tensor.shape[1:]) == self.size[1:]


@dataclass(frozen=True)
class Slot(Token):
    """Stands in the place of a tensor of the network's return value."""

    number: int


@dataclass(frozen=True)
class Layer:
    """One call in the traced network: a leaf module, an opaque module or a function."""

    name: str
    node: fx.Node
    parts: tuple[fx.Node, ...]
    """nodes that take tensors out of a call that returned several"""
    module: str
    """dotted name of the module called, or of the one whose code calls the function"""
    is_module: bool
    target: Any
    values: tuple[Value, ...]
    """the tensors that it returns"""
    parameters: frozenset[str]
    buffers: frozenset[str]
    mutated: tuple[frozenset[int], ...]
    """storages changed in place, per recording"""
    mutated_names: frozenset[str]
    """parameters and buffers changed in place"""
    flops: int
    """of convolutions and matrix products, forward, at the traced batch size"""


@dataclass(frozen=True, eq=False)
class NetworkGraph:
    """A traced network. Made by `trace`."""

    network: nn.Module
    graph: fx.Graph
    """targets start with ``network.`` or ``constants.``; see `stage.Namespace`"""
    layers: tuple[Layer, ...]
    constants: dict[str, Any]
    template: Any
    """the network's return value with a `Slot` for each tensor"""
    outputs: tuple[fx.Node, ...]
    structure: Hashable
    """structure of the arguments, and all in them that is not a tensor"""
    leaves: tuple[Leaf, ...]
    """the tensors in the arguments"""
    autocast: torch.dtype | None
    """what autocast computed in; None: it was off"""
    training: bool | None
    """None: right in both modes; else the mode of the network that the graph is right for"""
    batch: int | None
    """the traced batch size"""
    opaque: dict[str, str]
    """modules that could not be followed, as one layer each, and why"""
    memories: tuple[frozenset[str], ...]
    """names of opaque modules that share a Python object which they change: no cut parts them"""
    fingerprint: str
    """equal on every rank that traced the same network for the same sizes"""
    example: tuple[Any, Any] = field(repr=False)
    """descriptions of the traced arguments"""

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """One placeholder for each tensor in the arguments."""
        return tuple(node for node in self.graph.nodes if node.op == "placeholder")

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Parameters that no layer uses; they belong to no partition and no stage."""
        used = frozenset().union(*(layer.parameters for layer in self.layers), frozenset())
        returned = {str(node.target).removeprefix("network.") for node in self.outputs}
        names = (name for name, _ in self.network.named_parameters())
        return tuple(name for name in names if name not in used | returned)

    def value(self, node: fx.Node) -> Value | None:
        """What is known of the tensor that a node stands for; None: it is no tensor."""
        value = node.meta.get("value")
        return value if isinstance(value, Value) else None

    def batch_of(self, tensors: Sequence[Tensor]) -> int | None:
        """The batch size of a call, from the tensors of `bind`."""
        return next((t.shape[0] for t, leaf in zip(tensors, self.leaves) if leaf.batched), None)

    def signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """See `signature`."""
        return signature(args, kwargs)

    def accepts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the graph is right for a call: it differs in the batch size at most."""
        tensors: list[Tensor] = []
        return flatten((args, dict(kwargs)), tensors) == self.structure and self._fits(tensors)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        batch = self.batch_of(tensors)
        autocast = autocast_dtype(tensors[0].device) if tensors else None
        return autocast == self.autocast and all(
            leaf.fits(tensor, batch) for leaf, tensor in zip(self.leaves, tensors)
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors in the arguments, in the order that the first stage takes them.

        Raises:
            NetworkError: the call differs from the traced one in more than the batch size.
        """
        tensors: list[Tensor] = []
        if flatten((args, dict(kwargs)), tensors) == self.structure and self._fits(tensors):
            return tensors
        text = first_difference(self.example[0], args, "args") or first_difference(
            self.example[1], dict(kwargs), "kwargs"
        )
        raise NetworkError(
            f"the network was traced for another call: {text or self._size_difference(tensors)}; "
            "trace it again for this one"
        )

    def _size_difference(self, tensors: Sequence[Tensor]) -> str:
        batch = self.batch_of(tensors)
        paths = [path for path, _ in tensors_in(self.example)]
        for path, leaf, new in zip(paths, self.leaves, tensors):
            if not leaf.fits(new, batch):
                where = ("args" if path[0][1] == 0 else "kwargs") + spelled(path[1:])
                return (
                    f"{where} is {tuple(new.shape)} {new.dtype}, it was {leaf.size} {leaf.dtype}"
                    + " (the first size is the batch's)" * leaf.batched
                )
        now = autocast_dtype(tensors[0].device)
        return f"autocast differs: it computes in {now}, it was {self.autocast}"

    def pack(self, outputs: Sequence[Tensor]) -> Any:
        """The network's return value, from the tensors that the last stage returns."""
        return rebuild(self.template, lambda v: outputs[v.number] if isinstance(v, Slot) else v)

    def split(self, leaves: Sequence[Tensor], microbatches: int) -> list[list[Tensor]]:
        """Cut the tensors of `bind` along dimension 0, like `torch.Tensor.chunk`.

        Tensors whose first size was the batch's are cut, all others are passed whole. As with
        ``chunk`` there may be fewer parts than asked for.
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
