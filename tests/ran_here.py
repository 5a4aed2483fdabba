"""What notes in which process it happens: an operation of a stage, a gradient that has arisen.

Hooks of modules run where the network's Python runs, on the driver. What a stage computes on
another rank is seen by an operation alone: the networks of tests call one in their stages.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

LISTENERS: list[Callable[[str, bool], None]] = []
"""Called with the name that a run of the operation was given, and whether it is trained."""


_NODES: list[Any] = []  # torch forgets the hooks of a node that nobody keeps


def hear_of_gradients(parameter: nn.Parameter, note: Callable[[], object]) -> None:
    """Have ``note`` called in the process in which a gradient is added to ``parameter.grad``.

    Hooks on a parameter are the user's, which the strategy calls once for all pieces of a gradient;
    the node that adds the pieces is nobody's.
    """

    def heard(*_: Any) -> None:
        note()

    if type(parameter) is not nn.Parameter:  # it has no numbers yet, and will be another tensor
        parameter.register_post_accumulate_grad_hook(heard)
        return
    node: Any = get_gradient_edge(parameter).node
    node.register_hook(heard)
    _NODES.append(node)


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
