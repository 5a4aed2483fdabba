"""What it takes to compute a whole network on one rank, and to leave no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.graph import Leaf, NetworkGraph
from lightning_hybrid.remote import value_of

Result = TypeVar("Result")


def with_room_for(module: nn.Module, device: torch.device) -> torch.device:
    """The device to compute a whole network on: this rank's GPU if it has room, else the CPU.

    It must have twice the size free of all tensors that are not on it yet.

    Args:
        module: the network.
        device: the device of this rank.
    """
    if device.type != "cuda":
        return device
    away = (t for t in (*module.parameters(), *module.buffers()) if t.device != device)
    size = sum(tensor.nbytes for tensor in away if tensor.layout == torch.strided)
    return device if 2 * size <= torch.cuda.mem_get_info(device)[0] else torch.device("cpu")


def with_saved(
    run: Callable[[], Result], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Result:
    """Run code with hooks on the tensors that autograd saves; if it fails by them, without.

    `torch.func` refuses such hooks, and a forward that runs a backward inside needs what was saved.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run()
    except RuntimeError as error:
        if "saved tensor" not in str(error):
            raise
    return run()


def fresh(graph: NetworkGraph, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of a graph, with copies in the place of those that the network writes to."""
    written = {leaf.node for leaf in graph.written_leaves}
    return [
        tensor.detach().clone() if leaf.node in written else tensor
        for leaf, tensor in zip(graph.leaves, leaves)
    ]


def stays_on_cpu(graph: NetworkGraph, leaf: Leaf) -> bool:
    """Whether an input was on the CPU when the network was captured elsewhere.

    (Where it is now says nothing: before a network is cut it waits on the CPU, with its inputs.)
    """
    example = leaf.node.meta.get("example_value")
    return isinstance(example, Tensor) and example.device.type == "cpu" != graph.device.type


def own_copy(value: Tensor, device: torch.device) -> Tensor:
    """A copy of a parameter or buffer, on ``device``, that shares no memory with it."""
    with as_they_are():
        wanted = value.requires_grad
        copy = value_of(value).detach().to(device, copy=True)
    return copy.requires_grad_(wanted)
