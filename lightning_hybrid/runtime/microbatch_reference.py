"""Micro-batches without stages: the reference that a pipeline is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._trees import rebuild, tensors_in
from lightning_hybrid.errors import NetworkError


def call_in_chunks(
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    chunks: int,
) -> Any:
    """``torch.cat([net(x_i) for x_i in x.chunk(chunks)])`` for any arguments and outputs.

    Args:
        forward: of the network.
        arguments: positional arguments; tensors whose first size is the batch's are split.
        keywords: keyword arguments, likewise.
        chunks: number of micro-batches.

    Raises:
        NetworkError: an output has another first size than the micro-batch.
    """
    tensors = [tensor for _, tensor in tensors_in((arguments, keywords)) if tensor.dim()]
    if not tensors:
        return forward(*arguments, **keywords)
    batch = tensors[0].shape[0]
    sizes = [len(part) for part in torch.empty(batch, device="meta").chunk(chunks)]
    results = []
    for start, size in zip(_starts(sizes), sizes):

        def part(leaf: Any, start: int = start, size: int = size) -> Any:
            split = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch
            return leaf.narrow(0, start, size) if split else leaf

        some_arguments, some_keywords = rebuild((arguments, keywords), part)
        results.append(forward(*some_arguments, **some_keywords))
    if len(results) == 1:
        return results[0]
    columns = iter(zip(*([tensor for _, tensor in tensors_in(r)] for r in results)))
    return rebuild(
        results[0],
        lambda leaf: _join(next(columns), sizes) if isinstance(leaf, Tensor) else leaf,
    )


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _join(slices: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    if any(not s.dim() or len(s) != size for s, size in zip(slices, sizes)):
        raise NetworkError(
            f"an output of shape {tuple(slices[0].shape)} does not follow the batch, so the "
            "batch cannot be split into micro-batches; use num_microbatches=1"
        )
    return torch.cat(slices)
