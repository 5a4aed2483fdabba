"""Activation recomputation that leaves the statistics of batch normalisation alone.

Nothing but torch's own checkpoint without options: TorchDynamo captures that, so that a strategy
which cuts the captured network can cut this one too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

Normalise = Callable[[nn.Module, Tensor], Tensor]
"""Calls a layer of batch normalisation."""


def called(layer: nn.Module, x: Tensor) -> Tensor:
    """Call a layer of batch normalisation as it is."""
    out: Tensor = layer(x)
    return out


def recomputed(
    forward: Callable[[Tensor, Normalise], Tensor], norms: Sequence[nn.Module], x: Tensor
) -> Tensor:
    """Call ``forward(x, normalise)`` and keep only ``x``; the backward computes the rest again.

    The second computation would update the running statistics of the batch normalisations once
    more. So both computations write them to tensors of their own, and the layers take those of the
    first one: training ends with the same numbers as without recomputation.

    Args:
        forward: Must call its batch normalisations as ``normalise(layer, input)``.
        norms: Those layers, in the order in which it calls them; each has a momentum and weights.
        x: Its input.
    """
    learning = [layer for layer in norms if layer.training]

    def body(x: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []

        def normalise(layer: nn.Module, y: Tensor) -> Tensor:
            if not layer.training:
                return called(layer, y)
            own = _fresh_statistics(layer)
            found.extend((own["running_mean"], own["running_var"]))
            out: Tensor = functional_call(layer, own, (y,))
            return out

        return forward(x, normalise), *found

    outputs: tuple[Tensor, ...] = checkpoint(body, x, use_reentrant=False)
    out, *found = outputs
    for layer, mean, variance in zip(learning, found[::2], found[1::2]):
        _take(layer, mean, variance)
    return out


def _fresh_statistics(layer: nn.Module) -> dict[str, Tensor]:
    # not made from the layer's own: what goes into the region must not change before the backward
    weight: Tensor = layer.weight  # type: ignore[assignment]
    zeros = torch.zeros_like(weight, requires_grad=False)
    count = torch.zeros((), dtype=torch.long, device=weight.device)
    return {"running_mean": zeros, "running_var": zeros.clone(), "num_batches_tracked": count}


def _take(layer: nn.Module, mean: Tensor, variance: Tensor) -> None:
    """Let a layer learn from a batch: its statistics times the momentum, as they were written."""
    kept = 1 - layer.momentum  # type: ignore[operator]
    layer.running_mean.mul_(kept).add_(mean)  # type: ignore[operator]
    layer.running_var.mul_(kept).add_(variance)  # type: ignore[operator]
    layer.num_batches_tracked.add_(1)  # type: ignore[operator]
