"""Optimizers and learning rates by name, for configuration files."""

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

OptimizerName = Literal["sgd", "adamw"]
ScheduleName = Literal["constant", "cosine", "step"]

STEPS = 3
"""Equal parts that "step" cuts the run into, each with a tenth of the rate before."""


def make_optimizer(
    name: OptimizerName,
    parameters: Iterable[nn.Parameter],
    learning_rate: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> torch.optim.Optimizer:
    """SGD, plain when ``momentum`` is 0, or AdamW (momentum and Nesterov are SGD's alone).

    Raises:
        ValueError: If Nesterov's variant is asked for without momentum.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov=true needs a momentum above 0; set momentum, or nesterov=false.")
    return torch.optim.SGD(
        parameters,
        lr=learning_rate,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
    )


def rate_factor(schedule: ScheduleName, done: float, warmup: float) -> float:
    """The learning rate as a part of its highest value.

    Args:
        schedule: "constant", "cosine" (to 0 at the end), or "step" (a tenth after each third of the
            run, so that the last third has 1e-2 of the first).
        done: Part of the run that is done, 0 to 1.
        warmup: Part of the run in which the rate grows linearly from almost 0; the schedule takes
            the rest.
    """
    if done < warmup:
        return max(done / warmup, 1e-3)
    rest = min((done - warmup) / (1 - warmup), 1.0)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * rest)) / 2
    if schedule == "step":
        return float(0.1 ** min(int(rest * STEPS + 1e-9), STEPS - 1))
    return 1.0
