"""Batch normalisation over the replicas (``Trainer(sync_batchnorm=True)``), on any backend.

Inside :class:`Synchronised` every batch normalisation in training takes its statistics over the
micro-batches that have the same number on all replicas. So it computes what one device computes
whose micro-batch i is the union of the replicas' micro-batches i. The modules are not replaced.
(``torch.nn.SyncBatchNorm`` replaces them, needs CUDA, and works only over process groups of
``torch.distributed``.)

Without ``sync_batchnorm=True`` each layer takes the statistics of one micro-batch of its replica,
as torch computes them. Running statistics of stages with copies: ``stage/statistics_of_copies.py``.

Its collectives cannot deadlock: the replicas of a stage run the same instruction list and the same
layers, so they call them in the same order; and that is the order of the list, in which one replica
by itself runs without deadlock. The collectives have a group of their own, so that none is paired
with an all-reduce of gradients: when that is called depends on which gradients there are. As for
the averaging of gradients, all replicas must call the network equally often.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_hybrid.comm import ANOTHER_REPLICA, Group, start, wait

_BACKWARDS = (Tensor.backward, torch.autograd.backward)


class Synchronised(TorchFunctionMode):
    """Context in which batch normalisation in training takes its statistics over a group of ranks.

    Each such layer waits for the same layer on the other ranks: all ranks of the group must run the
    same layers in the same order.

    Args:
        group: the ranks that have these layers, one per replica.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func in _BACKWARDS and set(types) <= {Tensor}:
            return self._backward(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _backward(self, func: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Run a backward in this mode, for layers that activation checkpointing runs again.

        torch switches the mode off while ``__torch_function__`` runs, which gets every backward
        that starts from tensors. So the mode is entered again here, and the backward is started
        from edges of the graph, which ``__torch_function__`` does not get.

        Args:
            func: ``Tensor.backward`` or ``torch.autograd.backward``.
            tensors: where the backward starts: a tensor, or a sequence of tensors.
            args: further positional arguments of ``func``.
            kwargs: keyword arguments of ``func``.
        """
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = kwargs.pop("gradient", kwargs.pop("grad_tensors", args[0] if args else None))
        starts = given if isinstance(given, list | tuple) else [given] * len(roots)
        pairs = [(r, _start(r, g)) for r, g in zip(roots, starts) if isinstance(r, Tensor)]
        known = all(root.requires_grad and start is not None for root, start in pairs)
        if len(pairs) < len(roots) or not known or kwargs.get("inputs") is not None:
            func(tensors, given, *args[1:], **kwargs)  # or torch's own error
            return
        with self:
            edges = [get_gradient_edge(root) for root in roots]
            torch.autograd.backward(edges, [start for _, start in pairs], *args[1:], **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``torch.nn.functional.batch_norm``; in training over all ranks, which call it together.

        The arguments are those of torch's function, and so is the result.
        """
        # running statistics are read by each rank for itself
        if not training or self._group.size() == 1:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )

        def note(mean: Tensor, variance: Tensor, count: Tensor) -> None:
            # as torch does: running statistics get the unbiased variance, the output the biased one
            if running_mean is not None and running_var is not None:
                unbiased = variance * (count / (count - 1))
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)

        normalised: Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, eps, self._group, note
        )
        return normalised


def _start(root: Tensor, gradient: Tensor | None) -> Tensor | None:
    """The gradient that a backward from ``root`` starts with: the given one, or 1 for a scalar.

    Returns:
        The gradient; ``None``: ``root`` is no real scalar and no gradient was given, so that torch
        raises an error.
    """
    if gradient is None and root.numel() == 1 and not root.is_complex():
        return torch.ones_like(root)
    return gradient


class _BatchNorm(torch.autograd.Function):
    """The operation of :meth:`Synchronised._batch_norm` in autograd, with statistics of all ranks.

    y = (x - mean) / sqrt(variance + eps) * weight + bias. All ranks of the group run its forward,
    and its backward, together. The forward calls ``note`` with three tensors, which
    :func:`_statistics` has returned, to update running statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
        note: Callable[[Tensor, Tensor, Tensor], None],
    ) -> Tensor:
        # statistics of float16 are sums of squares that it cannot hold; torch widens them as well
        wide = x.to(_wide(x))
        mean, variance, count = _statistics(wide, group)
        note(mean, variance, count)  # at once: activation checkpointing stops at what is saved last
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _along(mean, x)) * _along(scale, x)
        output = normal if weight is None else normal * _along(weight, x)
        output = output if bias is None else output + _along(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.has_bias = bias is not None
        ctx.group = group
        return output.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        wide = gradient.to(_wide(x))
        normal = (x.to(wide.dtype) - _along(mean, x)) * _along(scale, x)
        axes = _axes(x)
        sums = torch.stack([wide.sum(axes), (wide * normal).sum(axes)])
        # each replica has a part of the gradients of weight and bias: their averaging adds them up
        bias_gradient, weight_gradient = sums
        if not ctx.needs_input_grad[0]:
            # all replicas of a layer agree on this, as they hold the same flags
            input_gradient = None
        else:
            # Every number of the group's micro-batch has moved the mean and the variance, so its
            # gradient has two parts through them, which are sums over all ranks.
            total = sums.clone()
            work = start(ctx.group.allreduce, [total], peer=ANOTHER_REPLICA)
            wait(work, ANOTHER_REPLICA)
            of_bias, of_weight = total / count
            input_gradient = wide - _along(of_bias, x) - normal * _along(of_weight, x)
            factor = scale if weight is None else scale * weight
            input_gradient = (input_gradient * _along(factor, x)).to(x.dtype)
        return (
            input_gradient,
            weight_gradient.to(weight.dtype) if weight is not None else None,
            bias_gradient.to(weight.dtype if weight is not None else x.dtype)
            if ctx.has_bias
            else None,
            None,
            None,
            None,
        )


def _statistics(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean and variance per channel over all ranks of the group, which call this together.

    Every rank adds up the same parts in the same order, so all get the same bits.

    Args:
        x: this rank's input of the layer, (batch, channels, ...).
        group: the ranks.

    Returns:
        Three tensors: the mean of each channel; the biased variance of each channel; a scalar, how
        many numbers each channel has on all ranks together.
    """
    count = x.numel() // x.shape[1]
    variance, mean = torch.var_mean(x, _axes(x), correction=0)
    mine = torch.cat([mean, variance, mean.new_full((1,), count)])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    work = start(group.allgather, [parts], [mine], peer=ANOTHER_REPLICA)
    wait(work, ANOTHER_REPLICA)
    table = torch.stack(parts)
    # (micro-batches of replicas may be of different sizes: the last batch of an epoch)
    means, variances, counts = table.split([len(mean), len(mean), 1], dim=1)
    total = counts.sum()
    # variances about each rank's own mean, and of these means about the common one: sums of
    # squares about zero would lose all digits where the mean is large
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Reshape ``values``, one per channel, to broadcast against ``x``; float32 if x is 16-bit."""
    return values.to(_wide(x)).view(1, -1, *[1] * (x.dim() - 2))
