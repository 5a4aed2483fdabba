"""Optimizers that leave word of the states that their process has, also on workers."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from lightning_hybrid import register_optimizer

RANK = int(os.environ.get("LOCAL_RANK", "0"))
"""Among all processes; inside of a run the variable counts replicas."""


def note(optimizer: torch.optim.Optimizer) -> None:
    """In a step ``optimizer.state`` is what this rank has: its bytes, by number of the parameter.

    They are written to ``kept<RANK>.json``, where the process works.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {
        number: sum(value.nbytes for value in optimizer.state[p].values() if value.dim())
        for number, p in enumerate(parameters)
        if p in optimizer.state
    }
    Path(f"kept{RANK}.json").write_text(json.dumps(kept))


@register_optimizer
class Adam(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        note(self)
        return loss


@register_optimizer
class Momentum(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        note(self)
        return loss
