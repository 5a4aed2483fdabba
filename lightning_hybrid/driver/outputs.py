"""Outputs of micro-batches and their gradients, and backwards that cannot pass through stages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import is_batched
from lightning_hybrid.driver.driven_network import DrivenNetwork
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, joined, place_now, slices
from lightning_hybrid.stage import Call, Gradients


def refuse_backward(network: DrivenNetwork, call: Call, gradients: Sequence[Tensor | None]) -> None:
    """Refuse a backward of a kind that cannot pass through stages.

    Args:
        network: the network.
        call: its call.
        gradients: the gradients of the outputs of the call.

    Raises:
        NetworkError: the backward is for gradients of gradients, or for several gradients at once.
        RuntimeError: an earlier backward has freed what this one needs.
    """
    if torch.is_grad_enabled():
        raise NetworkError(
            f"create_graph=True, in a backward or torch.autograd.grad ({place_now()}): "
            "gradients of gradients cannot pass through a network that is cut into stages. "
            "Compute the penalty with a network that is not cut "
            "(the strategy's network=...), or train with strategy='ddp'."
        )
    if any(map(is_batched, gradients)):
        raise NetworkError(
            f"is_grads_batched=True, or another vmap of a backward ({place_now()}): many "
            "gradients at once cannot pass through a network that is cut into stages. Compute "
            "them one after the other, with retain_graph=True (for jacobians: "
            "vectorize=False)."
        )
    if call.number not in network.calls:
        raise RuntimeError(
            "Trying to backward through a call of the network a second time. Specify "
            "retain_graph=True in the first backward."
        )


def join_outputs(parts: Sequence[Sequence[Any]], graph: NetworkGraph) -> list[Any]:
    """Join the outputs of micro-batches into those of the whole batch.

    Args:
        parts: per micro-batch, the outputs.
        graph: tells in which dimension an output has the samples; of an output without samples
            that of the first micro-batch is taken.
    """
    if len(parts) == 1:
        return list(parts[0])
    rows = [graph.rows[node] for node in graph.tensor_outputs]
    rows += [None] * (len(parts[0]) - len(rows))  # numbers are the same in all of them
    return [s[0] if r is None else joined(s, r) for s, r in zip(zip(*parts), rows)]


def split_gradients(
    gradients: Sequence[Tensor | None], sizes: Sequence[int], graph: NetworkGraph
) -> list[Gradients]:
    """Split gradients of the outputs of a batch into those of its micro-batches.

    The gradient of an output that is the same in all micro-batches goes to the first one's.

    Args:
        gradients: the gradients of the outputs of the whole batch.
        sizes: how many samples each micro-batch has.
        graph: tells in which dimension an output has the samples.

    Returns:
        Per micro-batch, the gradients of its outputs.
    """
    if len(sizes) == 1:
        return [list(gradients)]
    rows = [graph.rows[node] for node in graph.tensor_outputs]
    columns: list[Gradients] = []
    for index, gradient in enumerate(gradients):
        where = rows[index] if index < len(rows) else None
        if gradient is None:
            columns.append([None] * len(sizes))
        elif where is None:
            others = [torch.zeros_like(gradient) for _ in sizes[1:]]
            columns.append([gradient, *others])
        else:
            columns.append([*slices(gradient, where, sizes)])
    return list(map(list, zip(*columns)))
