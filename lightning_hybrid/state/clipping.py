"""The arithmetic of clipping by norm, and of one loss scale, over all stages.

Each rank takes the norms of its own gradients. The driver asks for them, and sends one factor to
all ranks (:meth:`lightning_hybrid.driver.driven_optimizers.DrivenOptimizers.clip_norm`).
The scaler of ``precision="16-mixed"`` is on the driver: each rank unscales its own gradients, and
if one is not finite on any rank, all ranks skip the step.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def unscale(gradients: Sequence[Tensor], factor: Tensor) -> bool:
    """Multiply gradients by ``factor``, in place, and return whether one of them was not finite.

    Raises:
        ValueError: a gradient is float16, whose small numbers unscaling would turn to zero.
    """
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "gradients in float16 cannot be unscaled: with precision='16-mixed' the weights are "
            "to be float32. Is a part of the network cast by hand (.half())?"
        )
    if not gradients:
        return False
    # one number for all: a GPU is waited for once, and not for each gradient
    finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
    factor = factor.to(gradients[0].device)
    for gradient in gradients:
        gradient.mul_(factor)
    return not bool(finite)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that this rank has of an optimizer's parameters, in the order of its groups."""
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


def total_norm(norms: Mapping[str, Tensor], names: Iterable[str], order: float = 2.0) -> Tensor:
    """The norm of all gradients together, as ``torch.nn.utils.get_total_norm`` computes it.

    Args:
        norms: norm of each gradient of each rank, by parameter name.
        names: of all parameters, in the order of one device (sums are rounded in that order).
        order: of the norm.
    """
    rank = {name: index for index, name in enumerate(names)}
    ordered = sorted(norms, key=lambda name: rank.get(name, len(rank)))
    # torch stacks no empty list
    if not ordered:
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[n] for n in ordered]), order)
    return total


def clip_factor(total: Tensor, max_norm: float) -> float:
    """The factor to multiply all gradients by, as in ``torch.nn.utils.clip_grads_with_norm_``.

    Args:
        total: the norm of all gradients together.
        max_norm: the bound.
    """
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))
