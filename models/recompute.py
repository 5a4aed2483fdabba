"""Activation recomputation that leaves the statistics of batch normalisation alone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(owner: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call ``forward(x)`` and keep only ``x``; the backward pass computes the rest again.

    The second computation would update the running statistics of the batch normalisations in
    ``owner`` once more; they are held still meanwhile, so that training ends with the same numbers
    as without recomputation.
    """
    if not torch.is_grad_enabled():
        return forward(x)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_held(owner)

    out: Tensor = checkpoint(forward, x, use_reentrant=False, context_fn=contexts)
    return out


@contextmanager
def _statistics_held(owner: nn.Module) -> Iterator[None]:
    norms = [m for m in owner.modules() if isinstance(m, nn.BatchNorm3d)]
    # a momentum of 0 keeps mean and variance; switching the tracking off would change what the
    # layer saves for the backward pass, and checkpoint() compares that
    momenta = [norm.momentum for norm in norms]
    counted = [norm.num_batches_tracked for norm in norms]
    before = [None if count is None else count.clone() for count in counted]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count, value in zip(norms, momenta, counted, before):
            norm.momentum = momentum
            if count is not None and value is not None:
                count.copy_(value)
