"""A captured network in pieces that fit into memory, with weights to try it on.

A network whose weights are here is one piece. One that was made in ``configure_model`` is whole on
no rank: each of its partitions is a piece, and has weights for as long as it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.network.graph import NetworkGraph
from lightning_hybrid.network.partition import network_partitions
from lightning_hybrid.network.stage import Stage, cut_at
from lightning_hybrid.tensors import is_deferred, is_offloaded, value_of


class Piece(NamedTuple):
    """A part of a network, with weights.

    Attributes:
        stage: its code.
        tensors: parameters and buffers, a little off what the network has.
        learned: which of them are parameters.
    """

    stage: Stage
    tensors: list[Tensor]
    learned: list[bool]


class Pieces:
    """The pieces of a captured network, in order.

    Args:
        graph: the captured network.
        device: where it is tried.
    """

    def __init__(self, graph: NetworkGraph, device: torch.device) -> None:
        self._network, self._device = graph.network, device
        self._state = dict((*graph.network.named_parameters(), *graph.network.named_buffers()))
        positions: list[int] = []
        if any(is_deferred(self._state[name]) for name in graph.used):
            positions = [partition.start for partition in network_partitions(graph)[1:]]
        self._codes = cut_at(graph, positions)

    def __len__(self) -> int:
        return len(self._codes)

    def __iter__(self) -> Iterator[Piece]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Piece:
        """A piece, each time with the same weights in memory of their own."""
        code = self._codes[number]
        generator = torch.Generator().manual_seed(number)
        return Piece(
            Stage(code, self._network, self._device),
            [a_little_off(self._state[name], generator, self._device) for name in code.tensors],
            [isinstance(self._state[name], nn.Parameter) for name in code.tensors],
        )


def a_little_off(value: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """A copy with noise, so that nothing is zero by initialisation."""
    with as_they_are():
        learned = isinstance(value, nn.Parameter)
    learned = isinstance(value, nn.Parameter)
    known = _stand_in(value, generator) if is_offloaded(value) else value_of(value)
    copy = known.detach().to(device, copy=True)
    if not copy.is_floating_point() or not copy.numel():
        return copy
    if not (learned or is_zero(copy)):
        return copy  # what is no parameter may have to be as it is, but a zero may close a gate
    noise = torch.randn(copy.shape, generator=generator, dtype=torch.float32)
    spread = copy.float().std().item() if copy.numel() > 1 else 0.0
    return copy.add_(noise.to(device, copy.dtype), alpha=0.1 * (spread or 0.5))


def is_zero(value: Tensor) -> bool:
    """Whether all numbers of a dense tensor are zero."""
    return value.layout is torch.strided and not value.any()


def _stand_in(value: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers for a tensor that another rank has, by which values stay of the size of one."""
    with as_they_are():
        shape, dtype = value.shape, value.dtype
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2:  # scales, offsets, variances
        return torch.rand(shape, generator=generator).add_(0.5).to(dtype)
    spread = max(math.prod(shape[1:]), 1) ** -0.5
    return torch.randn(shape, generator=generator).mul_(spread).to(dtype)
