"""The arithmetic of clipping by norm over all stages, and of loss scaling with one scale for all.

Each rank takes the norms of its own gradients. The driver asks for them, and tells all ranks the
norm of all gradients, by which each scales its own
(``driver/gradient_clipping.py``).
The scaler of ``precision="16-mixed"`` is on the driver: each rank unscales its own gradients, and
if one is not finite on any rank, all ranks skip the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import norm_each, unscale_each

ABSENT = -1.0
"""Stands among norms for a gradient that a rank does not have."""


def unscale(gradients: Sequence[Tensor], factor: Tensor) -> bool:
    """Multiply gradients by ``factor``, in place, and return whether one of them was not finite.

    Args:
        gradients: the gradients of this rank.
        factor: the inverse of the factor of loss scaling, a scalar on any device.

    Raises:
        ValueError: a gradient is float16, whose small numbers unscaling would turn to zero.
    """
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.dtype, []).append(gradient)
    if torch.float16 in alike:
        raise ValueError(
            "gradients in float16 cannot be unscaled: with precision='16-mixed' the weights are "
            "to be float32. Is a part of the network cast by hand (.half())?"
        )
    if not gradients:
        return False
    device = gradients[0].device
    # one number for all: a GPU is waited for once, and not for each gradient
    # (both float32, whatever the default type is: torch's function wants that)
    found = torch.zeros(1, dtype=torch.float32, device=device)
    factor = factor.to(device, torch.float32)
    for of_one_type in alike.values():
        unscale_each(of_one_type, found, factor)
    return bool(found)


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that this rank has of an optimizer's parameters, in their order.

    Parameters without a gradient here are left out.
    """
    # (each is asked for once: Python makes an object of it each time)
    each = [parameter.grad for parameter in parameters_of(optimizer)]
    return [gradient for gradient in each if gradient is not None]


def gradient_norms(parameters: Sequence[Parameter], order: float = 2.0) -> Tensor:
    """Compute the norm of each gradient that this rank has.

    Norms come from a GPU in one copy, for which the host waits once.

    Args:
        parameters: the parameters whose gradients are looked at.
        order: the order of the norm.

    Returns:
        On the CPU, one number for each parameter, `ABSENT` where this rank has no gradient; an
        empty tensor if it has no gradient at all.
    """
    each = [parameter.grad for parameter in parameters]
    gradients = [gradient for gradient in each if gradient is not None]
    if not gradients:
        return torch.empty(0)
    norms, device = norm_each(gradients, order), gradients[0].device
    if any(norm.device != device for norm in norms):
        norms = [norm.to(device) for norm in norms]
    together = torch.stack(norms).cpu()
    # (a tensor of a list of flags would be made flag by flag)
    flags = bytearray([gradient is not None for gradient in each])
    present = torch.frombuffer(flags, dtype=torch.bool)
    return together.new_full(present.shape, ABSENT).masked_scatter_(present, together)


def total_norm(ranks: Sequence[Tensor], driver_only: Tensor, order: float = 2.0) -> Tensor:
    """Compute the norm of all gradients together, as ``torch.nn.utils.get_total_norm`` does.

    Args:
        ranks: for each rank of the replica, what `gradient_norms` returns there. All ranks give it
            the same parameters, in the order that one device has (sums are rounded in it).
        driver_only: what `gradient_norms` returns for parameters that the driver alone knows.
        order: the order of the norms.

    Returns:
        A scalar; 0 if there is no gradient.
    """
    norms = torch.empty(0)
    for theirs in ranks:
        if len(theirs):
            norms = torch.where(theirs == ABSENT, norms, theirs) if len(norms) else theirs
    norms = torch.cat([each for each in (norms, driver_only) if len(each)] or [norms])
    # (no numbers have no norm of infinite order)
    if not len(norms):
        return torch.tensor(0.0)
    total: Tensor = torch.linalg.vector_norm(norms[norms != ABSENT], order)
    return total
