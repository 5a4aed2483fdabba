"""Check stages against the network that they were cut from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.errors import StitchError
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.stage import Stage, StageCode, cut_at, make_stages
from lightning_hybrid.network.untouched import untouched

_ALIGNMENT = 64
"""Torch's memory begins at a multiple of so many bytes, so that so many numbers are one, too."""


def check(graph: NetworkGraph, codes: Sequence[StageCode], leaves: Sequence[Tensor]) -> None:
    """Run the captured network and its stages on the same inputs and compare bit for bit.

    Both start from the same random state and the same buffers, without gradients; nothing of it
    remains. Stages get copies, as over a wire, by which only the numbers of a slice come and not
    what lies between them. Here it is exchanged and not left out, since the same numbers in another
    order may be rounded otherwise.

    Args:
        graph: the captured network.
        codes: its stages.
        leaves: from `NetworkGraph.bind`, on the device where the network is.

    Raises:
        StitchError: the outputs differ, or stages fail.
    """
    device = next((leaf.device for leaf in leaves), torch.device("cpu"))
    whole, parts = (make_stages(some, graph.network, device) for some in (cut_at(graph, []), codes))
    received = _Received()
    expected = _once(graph, whole, leaves, lambda value: value)
    try:
        found = _once(graph, parts, leaves, received)
    except Exception as error:
        raise _refusal(graph, f"they fail with {error}", received.parts) from error
    names = [node.name for node in (*graph.tensor_outputs, *graph.scalar_outputs)]
    for name, one, other in zip(names, expected, found, strict=True):
        if not _same_bits(one, other):
            differs = f"output {name!r} {_difference(one, other)}"
            raise _refusal(graph, differs, received.parts)


def _refusal(graph: NetworkGraph, what: str, parts: Sequence[tuple[int, ...]]) -> StitchError:
    advice = "and please report this network"
    if parts:
        advice = (
            f"or call .contiguous() on what is a part of a larger tensor (one of shape {parts[0]} "
            "crosses a cut: a slice, or expanded) before code reads beyond that part, as "
            "torch.as_strided can"
        )
    return StitchError(
        f"the stages of {type(graph.network).__name__} do not compute what the network computes: "
        f"{what}. Give other cut points (HybridGabraStrategy(allocation=[...])), {advice}."
    )


def run(
    graph: NetworkGraph,
    stages: Sequence[Stage],
    leaves: Sequence[Tensor],
    received: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Run stages one after the other; ``received`` makes what a stage gets of what was sent."""
    numbers = graph.values_of_numbers(graph.sizes(leaves))
    values: list[Any] = list(leaves)
    for stage in stages:
        values = stage([received(value) for value in values], numbers)
    return values


class _Received:
    """Copies of tensors that lie in memory as these do, with other numbers between theirs.

    Attributes:
        parts: shapes of those that do not fill their memory.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, ...]] = []

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = value.clone()
        if copy.stride() == value.stride():
            return copy
        self.parts.append(tuple(value.shape))
        return _among_others(value)


def _among_others(value: Tensor) -> Tensor:
    shape, strides = value.shape, value.stride()
    # sums may be rounded by where a tensor begins
    start = value.storage_offset() % _ALIGNMENT
    end = start + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    is_number = value.is_floating_point() or value.is_complex()
    other = torch.nan if is_number else ~value.flatten()[0]
    memory = torch.empty((int(end),), dtype=value.dtype, device=value.device).fill_(other)
    # what is expanded can be written once
    once = tuple(slice(0, None if stride else 1) for stride in strides)
    memory.as_strided(shape, strides, start)[once].copy_(value[once])
    return memory.as_strided(shape, strides, start)


def _once(
    graph: NetworkGraph,
    stages: Sequence[Stage],
    leaves: Sequence[Tensor],
    received: Callable[[Any], Any],
) -> list[Any]:
    grad = torch.set_grad_enabled(graph.differentiable)
    with untouched(graph.network, graph.written), grad:
        found = run(graph, stages, fresh(graph, leaves), received)
        # (copies: a buffer that is written and returned is put back now)
        return [value.detach().clone() if isinstance(value, Tensor) else value for value in found]


def fresh(graph: NetworkGraph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of a graph, those that the network writes to as copies."""
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
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest = (one.to(wide) - other.to(wide)).abs().max().item()
    return f"differs by up to {largest:.3g}"
