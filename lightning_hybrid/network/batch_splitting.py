"""Whether a batch may go through a network in parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from lightning_hybrid.network.graph import NetworkGraph


def why_whole(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> str | None:
    """Why a batch must go through the network as a whole; ``None``: it may be split.

    Args:
        graph: the captured network.
        leaves: the tensors of a call; see `NetworkGraph.bind`.
        microbatches: into how many parts, as in `torch.Tensor.chunk`.
    """
    if graph.is_static:
        return "its code was captured for one batch size only"
    if graph.meets is not None:
        return graph.meets
    if graph.batch_of(leaves) is None:
        return "its inputs have several batch sizes"
    parts = graph.split(leaves, microbatches)
    if (node := _lacks_a_sample(graph, parts)) is not None:
        return f"{graph.place_of(node)} needs two samples, and a part has one"
    if not fits(graph, leaves, microbatches):
        return "its code takes another way for other batch sizes"
    return None


def fits(graph: NetworkGraph, leaves: Sequence[Tensor], microbatches: int) -> bool:
    """Whether the captured graph is right for parts of these sizes."""
    if graph.batch_of(leaves) is None:
        return False
    parts = graph.split(leaves, microbatches)
    if _lacks_a_sample(graph, parts) is not None:
        return False
    return all(graph.guards_allow(graph.sizes(part)) for part in parts)


def _lacks_a_sample(graph: NetworkGraph, parts: Sequence[Sequence[Tensor]]) -> fx.Node | None:
    """An operation that needs two samples, where a part has one."""
    alone = any(graph.batch_of(part) == 1 for part in parts)
    return graph.needs_two_samples if alone else None
