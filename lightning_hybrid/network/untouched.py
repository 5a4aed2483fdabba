"""Run a network without leaving a trace in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_hybrid.network.recorder import unchanged


@contextlib.contextmanager
def untouched(network: nn.Module) -> Iterator[None]:
    """Undo what the block does to the network's buffers, modes and attributes, and to generators.

    Gradients are the caller's care. Hooks that the user registered on inner modules do run.
    """
    flags = [(module, module.training) for module in network.modules()]
    buffers = [(value, value.detach().clone()) for value in network.buffers()]
    with torch.random.fork_rng(devices=_cuda_devices(network)), unchanged(network):
        try:
            yield
        finally:
            for module, flag in flags:
                module.training = flag
            _restore(buffers)


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for value, copy in buffers:
            # an unchanged buffer may be waiting in somebody's graph, where a write would show
            if not torch.equal(value, copy):
                value.copy_(copy)


def _cuda_devices(network: nn.Module) -> list[int]:
    tensors = [*network.parameters(), *network.buffers()]
    return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
