"""Whether a batch may go through a network in parts.

What the graph shows is asked first: sizes that are used as numbers, results that do not follow the
batch, writes, random numbers. What it cannot show (``x - x.mean(0)``) is tried
(:mod:`lightning_hybrid.network.split_trial`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_hybrid._torch.graphs import higher_order_name
from lightning_hybrid._torch.modules import BatchNorm
from lightning_hybrid._torch.symbols import is_symbolic, symbols_in
from lightning_hybrid.network.graph import Layer, NetworkGraph
from lightning_hybrid.network.split_trial import differs_in_parts

MICROBATCH_STATISTICS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)
"""Buffers of batch normalisation, whose statistics are those of a micro-batch by agreement."""


def why_whole(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    """Why a batch must go through the network as a whole; ``None``: it may be split.

    Args:
        graph: the captured network.
        leaves: the tensors of a call; see `NetworkGraph.bind`.
        microbatches: into how many parts, as in `torch.Tensor.chunk`.
    """
    reason = _shown(graph, leaves, microbatches)
    return reason or differs_in_parts(graph, leaves, microbatches)


def fits(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> bool:
    """Whether the captured graph is right for parts of these sizes."""
    parts = graph.split(leaves, microbatches)
    if _lacks_a_sample(graph, parts) is not None:
        return False
    return all(graph.guards_allow(graph.sizes(part)) for part in parts)


def _lacks_a_sample(graph: NetworkGraph, parts: Sequence[Sequence[Tensor]]) -> fx.Node | None:
    """An operation that needs two samples, where a part has one."""
    alone = any(graph.batch_of(part) == 1 for part in parts)
    return graph.needs_two_samples if alone else None


# ---------------------------------------------------------------- what the graph shows


def _shown(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    if graph.is_static or graph.batch_of(leaves) is None:
        return "its code was captured for one batch size only"
    reason = _of_results(graph)
    if reason is not None:
        return reason
    for layer in graph.layers:
        reason = _of_layer(graph, layer)
        if reason is not None:
            return reason
    if not fits(graph, leaves, microbatches):
        if (node := _lacks_a_sample(graph, graph.split(leaves, microbatches))) is not None:
            return f"{graph.place_of(node)} needs two samples, and a part has one"
        return "its code takes another way for other batch sizes"
    return None


def _of_results(graph: NetworkGraph) -> str | None:
    for node in graph.tensor_outputs:
        if not graph.info[node].batched:
            return (
                f"the output {graph.place_of(node)} does not have the batch as its first dimension"
            )
    given = {leaf.node for leaf in graph.leaves if leaf.number}
    for node in graph.scalar_outputs:
        # a number that follows from given ones alone (a counter) is the same in all parts
        if not all(one in given or graph.is_scalar(one) for one in graph.behind(node)):
            return f"the output {graph.place_of(node)} is read from a tensor"
    for leaf in graph.written_leaves:
        if not leaf.batched:
            return f"{leaf.name} is changed in place"
    return None


def _of_layer(graph: NetworkGraph, layer: Layer) -> str | None:
    where = f"{layer.module}.{layer.name}".removeprefix(".")
    other = [name for name in layer.written if not _is_statistic(graph.network, name)]
    if other:
        return f"it changes {other[0]!r}"
    if not layer.effects.known:
        return f"what {where!r} does depends on values"
    if layer.effects.random and not _follows_batch(graph, layer):
        return f"{where!r} draws random numbers that are not of one sample each"
    if _scales_by_frequency(layer.node):
        return f"{where!r} divides gradients by how often an index is in the batch"
    for argument, number in _numbers_taken(layer.node):
        if _has_batch(graph, number) and not _is_size_argument(layer.node, argument):
            return f"{where!r} computes with the batch size"
    return None


def _follows_batch(graph: NetworkGraph, layer: Layer) -> bool:
    """Whether the batch's size is among those of the result, in any dimension."""
    examples = [n.meta.get("example_value") for n in (layer.node, *layer.parts)]
    sizes = [size for e in examples if isinstance(e, Tensor) for size in e.shape]
    return any(is_symbolic(size) and graph.symbol in symbols_in(size) for size in sizes)


def _scales_by_frequency(node: fx.Node) -> bool:
    """An embedding whose samples meet in the backward alone."""
    place = {F.embedding: 5, F.embedding_bag: 5, torch.embedding: 3, torch.embedding_bag: 3}
    if node.op != "call_function" or node.target not in place:
        return False
    given = node.args[place[node.target] :][:1]
    return any((*given, node.kwargs.get("scale_grad_by_freq", False)))


def _is_statistic(network: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    return key in MICROBATCH_STATISTICS and isinstance(network.get_submodule(owner), BatchNorm)


def _has_batch(graph: NetworkGraph, node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return is_symbolic(example) and graph.symbol in symbols_in(example)


def _numbers_taken(node: fx.Node) -> Iterator[tuple[int | str, fx.Node]]:
    """The scalars among the arguments of an operation, with their positions or names."""
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for place, value in places:
        found: list[fx.Node] = []
        fx.node.map_arg(value, found.append)
        for one in found:
            if one.meta.get("scalar") or one.meta.get("number"):
                yield place, one


_SHAPING = {
    *("view", "reshape", "expand", "repeat", "unflatten", "broadcast_to", "new_zeros", "new_ones"),
    *("new_empty", "new_full", "zeros", "ones", "empty", "full", "rand", "randn", "tile"),
    *("_vmap_increment_nesting", "_remove_batch_dim"),
    *("view_as", "resize", "split", "chunk", "tensor_split", "narrow", "bernoulli", "normal"),
}
_FILLED_WITH = {"new_full": (2, "fill_value"), "full": (1, "fill_value")}


def _is_size_argument(node: fx.Node, place: int | str) -> bool:
    """Whether an operation takes a number as a size, and not to compute with it."""
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if node.target is operator.getitem:
        return False
    if higher_order_name(node.target) is not None:
        return True  # what is done with it inside, the trial shows
    if name == "randint":  # its bounds are plain arguments, its size is a tuple
        return place == "size" or (isinstance(place, int) and isinstance(node.args[place], tuple))
    return name in _SHAPING and place not in _FILLED_WITH.get(name, ())
