"""Run code of ours on a network so that nothing of it remains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.tensors import is_deferred


@contextlib.contextmanager
def untouched(network: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Undo what the block does to some of a network's tensors, and to torch's generators.

    Args:
        network: the network.
        names: of the parameters and buffers that the block writes to.
    """
    tensors = dict((*network.named_parameters(), *network.named_buffers()))
    written = [tensors[name] for name in names if not is_deferred(tensors[name])]
    with as_they_are():
        kept = [(tensor, tensor.detach().clone()) for tensor in written]
    with torch.random.fork_rng(devices=cuda_devices(tensors.values())):
        try:
            yield
        finally:
            with torch.no_grad(), as_they_are():
                for tensor, copy in kept:
                    tensor.copy_(copy)


def cuda_devices(tensors: Iterable[Tensor]) -> list[int]:
    """The numbers of the CUDA devices that tensors are on."""
    return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
