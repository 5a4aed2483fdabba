"""Optimizers: their hooks, and the scalers of their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


def replace_unscaling(
    scaler: GradScaler, unscale: Callable[[Optimizer, Tensor], bool] | None
) -> None:
    """Have a gradient scaler unscale gradients by another function than its own.

    There is no public way to give a scaler the gradients that other ranks have.

    Args:
        scaler: the scaler.
        unscale: called with the optimizer and the factor for its gradients; returns whether some
            gradient was not finite. ``None``: the scaler gets its own method back.
    """
    vars(scaler).pop("_unscale_grads_", None)
    assert callable(scaler._unscale_grads_)  # else nobody would call what is put in its place
    if unscale is not None:

        def unscale_everywhere(
            optimizer: Optimizer, factor: Tensor, found: Tensor, _: bool
        ) -> dict[torch.device, Tensor]:
            return {found.device: found.fill_(unscale(optimizer, factor))}

        vars(scaler)["_unscale_grads_"] = unscale_everywhere


def unscales_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer unscales gradients in its own step, as those with ``fused=True`` do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` runs hooks that are registered on the optimizer.

    It does if ``Optimizer.__init__`` has been called. Wrappers around another optimizer often do
    not call it. There is no public way to ask.
    """
    return bool(getattr(type(optimizer).step, "hooked", False)) and hasattr(
        optimizer, "_optimizer_state_dict_post_hooks"
    )


def has_step_hook(optimizer: Optimizer, handle: Any) -> bool:
    """Whether an optimizer still has a pre-hook of its step; a second ``__init__`` drops hooks.

    Args:
        optimizer: the optimizer.
        handle: what ``register_step_pre_hook`` has returned.
    """
    return handle.id in optimizer._optimizer_step_pre_hooks


def order_step_hooks(optimizer: Optimizer, *, last: Any, first: Any) -> None:
    """Put a pre-hook of an optimizer's step behind all others, and a post-hook before all others.

    Args:
        optimizer: the optimizer with the hooks.
        last: handle from ``register_step_pre_hook`` of the hook that is to run last.
        first: handle from ``register_step_post_hook`` of the hook that is to run first.
    """
    before: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, annotated as less
    after: Any = optimizer._optimizer_step_post_hooks
    before.move_to_end(last.id)
    after.move_to_end(first.id, last=False)
