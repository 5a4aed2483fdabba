"""Streamed schedules on one device, by their formulas: no processes, no queues, no autograd.

The network is a row of stages, each a row of ``Linear`` and ``Tanh``. Stage k of K sees batch t
with the weights that it had at the beginning of batch ``max(restart, t - a_k)``: a_k is its
look-ahead, ``restart`` the last batch before which nothing was under way. Everybody steps after
batch t with the gradient of batch t. What the backward computes with is one of

* ``stash``: the weights and activations of the forward, the gradient of one network whose stages
  are of different ages (PipeDream, and the formulas of DDG and FDG);
* ``recompute``: the input of the stage as it came, all else anew with the weights of now;
* ``current``: the activations of the forward, and the weights of now (what the code of DDG and FDG
  does).
"""

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Versions = list[list[dict[str, Tensor]]]
"""Per batch and stage, the weights at the beginning of the batch."""


def train_serially(
    stages: Sequence[nn.Sequential],
    optimizer: Optimizer,
    batches: Sequence[Tensor],
    loss_gradient: Callable[[Tensor], Tensor],
    ahead: Sequence[int],
    weights: str = "stash",
    *,
    restarts: Collection[int] = (),
    shrink: float = 1.0,
    window: int = 1,
    rates: Sequence[float] = (),
) -> None:
    """Train all stages in place.

    Args:
        stages: each a row of ``Linear`` and ``Tanh``.
        optimizer: of all parameters.
        batches: (B, n) each, one after the other.
        loss_gradient: from the output of the network to the gradient of the loss.
        ahead: a_k of each stage, 0 for the last one.
        weights: what the backward computes with.
        restarts: batches before which nothing was under way, besides the first one.
        shrink: what every gradient is multiplied with where it crosses a cut.
        window: number of batches to a step.
        rates: learning rate of each batch; empty: that of the optimizer.
    """
    history: Versions = []
    restart = 0
    for number, batch in enumerate(batches):
        restart = number if number in restarts else restart
        history.append([_copied(stage) for stage in stages])
        now = history[number]
        old = [history[max(restart, number - a)][k] for k, a in enumerate(ahead)]
        inputs, values = [], batch
        for stage, theirs in zip(stages, old):
            inputs.append(values)
            values = _forward(stage, theirs, values)[-1]
        if number % window == 0:
            optimizer.zero_grad()
        gradient = loss_gradient(values)
        for k in reversed(range(len(stages))):
            there = now[k] if weights == "recompute" else old[k]
            kept = _forward(stages[k], there, inputs[k])
            seen = old[k] if weights == "stash" else now[k]
            gradient = shrink * _backward(stages[k], seen, kept, gradient)
        for group in optimizer.param_groups if rates else ():
            group["lr"] = rates[number]
        if (number + 1) % window == 0 or number + 1 == len(batches):
            optimizer.step()


def in_stages(network: nn.Sequential, count: int) -> list[nn.Sequential]:
    """The same modules, as ``count`` stages of whole pairs of layers."""
    pairs = len(network) // 2
    ends = [2 * round(pairs * k / count) for k in range(count + 1)]
    return [network[a:b] for a, b in pairwise(ends)]


def _copied(stage: nn.Module) -> dict[str, Tensor]:
    return deepcopy({name: value.detach() for name, value in stage.named_parameters()})


def _forward(stage: nn.Sequential, weights: dict[str, Tensor], values: Tensor) -> list[Tensor]:
    """The input of each layer, and the output of the last one."""
    kept = [values]
    for name, layer in stage.named_children():
        if isinstance(layer, nn.Linear):
            kept.append(kept[-1] @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        else:
            assert isinstance(layer, nn.Tanh)
            kept.append(torch.tanh(kept[-1]))
    return kept


def _backward(
    stage: nn.Sequential, weights: dict[str, Tensor], kept: list[Tensor], gradient: Tensor
) -> Tensor:
    """Add to the gradients of the parameters; the gradient of the input."""
    layers = [*stage.named_children()]
    for index in reversed(range(len(layers))):
        name, layer = layers[index]
        if isinstance(layer, nn.Linear):
            _add(layer.weight, gradient.T @ kept[index])
            _add(layer.bias, gradient.sum(0))
            gradient = gradient @ weights[f"{name}.weight"]
        else:
            gradient = gradient * (1 - kept[index + 1] ** 2)
    return gradient


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
