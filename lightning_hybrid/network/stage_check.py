"""Check stages against the network that they were cut from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import StitchError
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.stage import Stage, StageCode, cut_at, make_stages
from lightning_hybrid.network.untouched import untouched


def check(graph: NetworkGraph, codes: Sequence[StageCode], leaves: Sequence[Tensor]) -> None:
    """Run the captured network and its stages on the same inputs and compare bit for bit.

    Both start from the same random state and the same buffers, without gradients; nothing of it
    remains.

    Args:
        graph: the captured network.
        codes: its stages.
        leaves: from `NetworkGraph.bind`, on the device where the network is.

    Raises:
        StitchError: the outputs differ.
    """
    device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    whole, parts = (make_stages(some, graph.network, device) for some in (cut_at(graph, []), codes))
    expected, found = (_once(graph, stages, leaves) for stages in (whole, parts))
    names = [node.name for node in (*graph.tensor_outputs, *graph.scalar_outputs)]
    for name, one, other in zip(names, expected, found, strict=True):
        if not _same_bits(one, other):
            raise StitchError(
                f"the stages of {type(graph.network).__name__} do not compute what the network "
                f"computes: output {name!r} {_difference(one, other)}. Give other cut points "
                "(HybridGabraStrategy(allocation=[...])), and please report this network."
            )


def run(graph: NetworkGraph, stages: Sequence[Stage], leaves: Sequence[Tensor]) -> list[Any]:
    """Run stages one after the other."""
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    values: list[Any] = list(leaves)
    for stage in stages:
        values = stage(values, numbers)
    return values


def _once(graph: NetworkGraph, stages: Sequence[Stage], leaves: Sequence[Tensor]) -> list[Any]:
    grad = torch.set_grad_enabled(graph.differentiable)
    with untouched(graph.network, graph.written), grad:
        found = run(graph, stages, fresh(graph, leaves))
        return [value.detach() if isinstance(value, Tensor) else value for value in found]


def fresh(graph: NetworkGraph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The same leaves; copies of those that the network writes to."""
    written = {leaf.node for leaf in graph.written_leaves}
    return [
        tensor.detach().clone() if leaf.node in written else tensor
        for leaf, tensor in zip(graph.leaves, leaves)
    ]


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other) or (one != one and other != other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    equal = one == other
    if one.is_floating_point() or one.is_complex():
        equal |= one.isnan() & other.isnan()
    return bool(equal.all())


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor):
        return f"is {other} and not {one}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"is {tuple(other.shape)} {other.dtype} and not {tuple(one.shape)} {one.dtype}"
    largest = (one.double() - other.double()).abs().max().item()
    return f"differs by up to {largest:.3g}"
