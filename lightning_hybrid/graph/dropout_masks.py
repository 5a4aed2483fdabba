"""Dropout whose masks are drawn for the whole batch, in the order and layout of one device.

Each dropout of a captured graph becomes two operations: one that draws its mask, of sizes alone,
and one that applies it. What is made of sizes alone is a part of the prologue
(:mod:`lightning_hybrid.graph.three_parts`): the driver draws it for all samples, and each
micro-batch gets the rows of its own, one byte for each element that may be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_hybrid._torch.graphs import copy_source
from lightning_hybrid._torch.symbols import captured_value, expression, is_symbolic, symbols_in
from lightning_hybrid._torch.tensors import is_fake
from lightning_hybrid.graph.graph import is_symbol

MASKS = "masks"
"""Key in the ``meta`` of a node that draws a mask: the node that gives the dropout its input."""

_ARGUMENTS = ("input", "p", "training", "inplace")
_BATCHED: dict[Any, int] = {F.dropout: 0, F.dropout1d: 3, F.dropout2d: 3, F.dropout3d: 5}
"""Per function: 0 if it drops elements; if it drops channels, the least dimensions of a batch."""


def with_masks(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a captured graph in which each dropout is split: draw a mask, apply it.

    A dropout whose rate or sizes are not known beforehand is left as it is, and so is one in a
    checkpointed region.

    Args:
        module: from TorchDynamo, with an example value for each node; it is not changed.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    for original, copy in copies.items():
        copy_source(original, copy)
    _Drawing(graph).draw()
    return fx.GraphModule(module, graph)


class _Drawing:
    """Changes a graph in place: adds the operations that draw its masks, and applies them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._numbers: dict[Any, fx.Node] = {}
        inputs = (n.meta.get("example_value") for n in graph.find_nodes(op="placeholder"))
        sizes = [size for e in inputs if isinstance(e, Tensor) for size in e.shape]
        self._known = {s for size in sizes if is_symbol(size) for s in symbols_in(size)}

    def draw(self) -> None:
        for node in list(self._graph.nodes):
            if (mask := self._mask(node)) is not None:
                mask.meta[MASKS] = node.all_input_nodes[0]
                _apply(node, mask)

    def _mask(self, node: fx.Node) -> fx.Node | None:
        """Insert a node before ``node`` that draws its mask.

        ``None`` if ``node`` is no dropout, or one whose mask cannot be drawn beforehand.
        """
        given = _given(node)
        if node.target not in _BATCHED or given.get("training", True) is not True:
            return None
        rate, source = given.get("p", 0.5), given["input"]
        example: Any = source.meta.get("example_value") if isinstance(source, fx.Node) else None
        if not is_fake(example) or type(rate) not in (int, float) or not 0 < rate < 1:
            return None
        like = torch.empty_like(example)  # as torch makes the noise: dense, in the same order
        batched, shape, order = _BATCHED[node.target], [*like.shape], _order(like)
        if batched:  # one for each channel
            shape = shape[:2] if like.dim() >= batched else [1, shape[0]]
            order = (0, 1)
        if not all(self._known.issuperset(symbols_in(s)) for s in shape if is_symbolic(s)):
            return None
        rest = order, rate, like.dtype, like.device
        with self._graph.inserting_before(node):
            sizes = tuple(map(self._size, shape))
            mask = self._graph.create_node(
                "call_function", drawn, (bool(batched), sizes, *rest), name=f"{node.name}_mask"
            )
        with example.fake_mode:
            mask.meta = {**node.meta, "example_value": drawn(bool(batched), shape, *rest)}
        return mask

    def _size(self, size: Any) -> Any:
        """A size, or a node for one that follows from those of the inputs.

        Such a node is a number (see :mod:`lightning_hybrid.graph.graph`), which the driver computes
        from its ``example_value`` in each call; by itself it is the size at the capture.
        """
        if not is_symbolic(size):
            return size
        key = expression(size, {})
        if key not in self._numbers:
            self._numbers[key] = self._graph.call_function(int, (captured_value(size),))
            self._numbers[key].meta["example_value"] = size
        return self._numbers[key]


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost to the innermost in memory."""
    steps = [captured_value(step) for step in tensor.stride()]
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-steps[dim], dim)))


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a dropout by their names."""
    return dict(zip(_ARGUMENTS, node.args)) | dict(node.kwargs)


def _apply(node: fx.Node, mask: fx.Node) -> None:
    """Turn a dropout node into one that applies a given mask."""
    given = _given(node)
    batched = _BATCHED[node.target]
    lead = 0 if not batched else 1 + (given["input"].meta["example_value"].dim() >= batched)
    inplace = bool(given.get("inplace", False))
    node.args = given["input"], mask, given.get("p", 0.5), inplace, lead
    node.kwargs, node.target = {}, applied


# ---------------------------------------------------------------- what runs


def drawn(
    channels: bool,
    shape: Sequence[int],
    order: Sequence[int],
    rate: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The mask of a dropout, as torch draws it: true where something is kept.

    Args:
        channels: whether the dimensions are samples and channels, each of which is kept or dropped.
        shape: the shape of the mask.
        order: its dimensions from the outermost to the innermost in memory.
        rate: the probability that something is dropped.
        dtype: of the tensor that dropout is applied to; torch's random numbers depend on it.
        device: of that tensor; likewise.
    """
    # laid out in memory like the tensor: torch assigns its random numbers in that order
    ones = torch.ones([shape[dim] for dim in order], dtype=dtype, device=device)
    ones = ones.permute(sorted(range(len(order)), key=order.__getitem__))
    kept = torch.feature_dropout(ones, rate, True) if channels else F.dropout(ones, rate)
    return kept != 0


def applied(tensor: Tensor, mask: Tensor, rate: float, inplace: bool, channels: int) -> Tensor:
    """Apply a mask of dropout to a tensor, with torch's own arithmetic.

    Args:
        tensor: the input of the dropout.
        mask: from `drawn`.
        rate: as there.
        inplace: whether to change the tensor in place.
        channels: how many leading dimensions of the tensor the mask covers; 0: all.
    """
    if channels:
        mask = mask.reshape(*mask.shape[2 - channels :], *[1] * (tensor.dim() - channels))
    noise = mask.to(tensor.dtype).div_(1 - rate)
    return tensor.mul_(noise) if inplace else tensor * noise
