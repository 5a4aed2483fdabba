"""Clipping of gradients and undoing of the loss scale, on the driver for all ranks.

The norm of all gradients is made of the norms that each rank computes (:meth:`clip_norm`), and a
step is left out on all ranks if any of them has found a gradient that is not finite
(:meth:`unscale`). What a rank computes: ``state/clipping_and_loss_scale.py``.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import signals_deferred
from lightning_hybrid.comm.protocol import ClipNorm, ClipValues, GradientNorm, Unscale
from lightning_hybrid.driver.driven_optimizers import DrivenOptimizers
from lightning_hybrid.state import gradient_norms, gradients_of, parameters_of, total_norm, unscale


class GradientClipping:
    """Clips and unscales the gradients of an optimizer on all ranks of a replica.

    Args:
        optimizers: the optimizers of the run.
    """

    def __init__(self, optimizers: DrivenOptimizers) -> None:
        self._optimizers = optimizers

    def __deepcopy__(self, memo: object) -> "GradientClipping":
        """The object itself: a copy of a Trainer, which holds its methods, has the same ranks."""
        return self

    @signals_deferred
    def clip_norm(
        self,
        optimizer: Optimizer,
        max_norm: float,
        order: float = 2.0,
        *,
        finite: bool = False,
    ) -> Tensor:
        """Scale the gradients on all ranks so that their common norm is at most ``max_norm``.

        Args:
            optimizer: the user's optimizer; the gradients are those of its parameters.
            max_norm: the bound.
            order: p of the p-norm.
            finite: whether a norm that is not finite is an error.

        Returns:
            The norm before scaling, a scalar.

        Raises:
            RuntimeError: the norm is not finite, and ``finite``; nothing was scaled.
        """
        index, max_norm, order = self._optimizers.index_of(optimizer), float(max_norm), float(order)
        parameters = parameters_of(optimizer)

        def compute() -> tuple[Tensor, Tensor]:
            # one norm per parameter, not per rank, so that they are added up as on one device
            known = [p for p in parameters if self._optimizers.knows(p)]
            others = [p for p in parameters if not self._optimizers.knows(p)]
            with as_they_are():
                return gradient_norms(known, order), gradient_norms(others, order)

        asked = GradientNorm(index, order)
        answers, (mine, driver_only) = self._optimizers.ask_beside(asked, compute)
        norms = [mine, *(norm for answer in answers for _, norm in answer.tensors)]
        total = total_norm(norms, driver_only, order)
        if finite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {order} for gradients is {total.item()}, so it cannot be "
                "clipped. To scale the gradients all the same, give error_if_nonfinite=False."
            )
        self._optimizers.tell(ClipNorm(index, max_norm, total.item(), total.dtype))
        with as_they_are():
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    @signals_deferred
    def unscale(self, optimizer: Optimizer, factor: Tensor) -> bool:
        """Multiply the gradients on all ranks by a factor, to undo loss scaling before a step.

        Args:
            optimizer: the user's optimizer; the gradients are those of its parameters.
            factor: the factor, a scalar.

        Returns:
            Whether a gradient is not finite; the same on all replicas, since gradients are averages
            over all of them.
        """

        def compute() -> bool:
            with as_they_are():
                return unscale(gradients_of(optimizer), factor)

        command = Unscale(self._optimizers.index_of(optimizer), factor.item())
        answers, mine = self._optimizers.ask_beside(command, compute)
        return mine or any(answer.holds for answer in answers)

    def clip_values(self, optimizer: Optimizer, bound: float) -> None:
        """Clamp the gradients of an optimizer's parameters on all ranks to [-bound, bound]."""
        self._optimizers.tell(ClipValues(self._optimizers.index_of(optimizer), float(bound)))
        with as_they_are():
            nn.utils.clip_grad_value_(parameters_of(optimizer), bound)
