"""An operation that notes in which process it runs: the networks of tests call it in their stages.

Hooks of modules run where the network's Python runs, on the driver. What a stage computes on
another rank is seen by an operation alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LISTENERS: list[Callable[[str, bool], None]] = []
"""Called with the name that a run of the operation was given, and whether it is trained."""


@torch.library.custom_op("ran_here::note", mutates_args=())
def note(value: Tensor, name: str, trained: bool) -> Tensor:
    """``value`` itself, as a copy."""
    for listener in LISTENERS:
        listener(name, trained)
    return value.clone()


@note.register_fake
def _(value: Tensor, name: str, trained: bool) -> Tensor:
    return torch.empty_like(value)


note.register_autograd(lambda ctx, gradient: (gradient, None, None))


def noting(name: str, *hooked: Any) -> Any:
    """A forward hook (with ``name`` bound) that has the module's output noted."""
    output = hooked[-1]
    if not isinstance(output, Tensor):
        return None
    return note(output, name, torch.is_grad_enabled())
