"""What stages of `served_script.py` use of a module of the user's: an operator, and a function."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("operators_of_served::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


halve.register_autograd(lambda ctx, grad: grad / 2)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def halve_and_square(x: Tensor) -> Tensor:
    return Square.apply(halve(x))
