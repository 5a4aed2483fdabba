"""Gradient clipping over all stages: each rank measures its own gradients, one factor for all."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that this rank has, in the order of the groups."""
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def gradient_norms(
    optimizer: Optimizer, names: Mapping[int, str], order: float = 2.0
) -> dict[str, Tensor]:
    """Norm of each gradient that this rank has, by parameter name, on the CPU.

    They come from a GPU in one copy, for which the host waits once.
    """
    norms = {
        names.get(id(parameter), f"unnamed{id(parameter)}"): torch.linalg.vector_norm(
            parameter.grad, order
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    device = next((norm.device for norm in norms.values()), None)
    together = [norm.to(device) for norm in norms.values()]
    return dict(zip(norms, torch.stack(together).cpu().unbind() if together else ()))


def clip_factor(
    norms: Mapping[str, Tensor], names: Iterable[str], max_norm: float, order: float = 2.0
) -> float:
    """What to multiply all gradients with, as ``torch.nn.utils.clip_grad_norm_`` computes it.

    Args:
        norms: norm of each gradient of each rank, by parameter name.
        names: of all parameters, in the order of one device (sums are rounded in that order).
        max_norm: the bound.
        order: of the norm.
    """
    rank = {name: index for index, name in enumerate(names)}
    ordered = sorted(norms, key=lambda name: rank.get(name, len(rank)))
    if not ordered:
        return 1.0
    total = torch.linalg.vector_norm(torch.stack([norms[name] for name in ordered]), order)
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
