"""Optimizers and the scalers of their gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer


def replace_unscaling(
    scaler: GradScaler, unscale: Callable[[Optimizer, Tensor], bool] | None
) -> None:
    """Have a scaler call ``unscale``, which returns whether a gradient was not finite.

    ``None`` gives the scaler its own method back. There is no public way to give a scaler the
    gradients that other ranks have.
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
    """Whether an optimizer takes scaled gradients and unscales them in its step (fused ones do)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` runs step hooks, which it does if ``Optimizer.__init__`` has run.

    Wrappers around another optimizer often do not call that. There is no public way to ask.
    """
    return bool(getattr(type(optimizer).step, "hooked", False)) and hasattr(
        optimizer, "_optimizer_state_dict_post_hooks"
    )


def has_step_hook(optimizer: Optimizer, handle: Any) -> bool:
    """Whether an optimizer still has this pre-hook of its step (lost if `__init__` ran again)."""
    return handle.id in optimizer._optimizer_step_pre_hooks


def order_step_hooks(optimizer: Optimizer, *, last: Any, first: Any) -> None:
    """Let the pre-hook ``last`` run after the others, the post-hook ``first`` before the others.

    Args:
        optimizer: the optimizer with the hooks.
        last: the handle from ``register_step_pre_hook``.
        first: the handle from ``register_step_post_hook``, which can only add at the end.
    """
    before: Any = optimizer._optimizer_step_pre_hooks  # an OrderedDict, annotated as less
    after: Any = optimizer._optimizer_step_post_hooks
    before.move_to_end(last.id)
    after.move_to_end(first.id, last=False)
