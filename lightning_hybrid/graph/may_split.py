"""Whether a batch may go through a network in micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_hybrid.graph.graph import NetworkGraph


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
