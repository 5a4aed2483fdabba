"""Functions of autograd in a network: which are proven to treat samples one by one, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import compared
from monai.networks.blocks.activation import MemoryEfficientSwish
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]
Code = Callable[["Net", Tensor], Tensor]
BATCH = 6
SWISH = MemoryEfficientSwish()

# TorchDynamo makes an object of each Function, which torch warns of
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Net(nn.Module):
    """Two layers, with a function between them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.more = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("fixed", torch.randn(8))
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.code(self, self.a(x)))
        return result


def why_whole(code: Code, *size: int) -> str | None:
    """Why a network with this code is not split; its numbers are those of one device."""
    parts = compared(Net(code), torch.randn(BATCH, *size, 8, dtype=torch.float64))
    assert parts.counted == 1 + (parts.why_whole is None)
    return parts.why_whole


def function(forward: Forward, backward: Forward) -> Any:
    """A Function of these two, which saves its inputs, then its results, for the backward.

    ``backward`` takes the incoming gradients, then what was saved.
    """

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            result = forward(*inputs)
            ctx.save_for_backward(*inputs, *(result if isinstance(result, tuple) else (result,)))
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return backward(*gradients, *ctx.saved_tensors)

    return Made.apply


def both(forward: Forward, backward: Forward) -> Code:
    """A network with a Function of these two; see `function`."""
    apply = function(forward, backward)
    return lambda net, h: apply(h)


def backward(code: Forward) -> Code:
    """A network with a Function that does nothing forward, and this backward."""
    return both(torch.clone, lambda g, x, y: code(g, x))


def in_checkpoint(code: Code) -> Code:
    return lambda net, h: checkpoint(lambda v: code(net, v * 2), h, use_reentrant=False)


def of_weight(code: Forward) -> Code:
    """A network with a Function that multiplies by a weight; ``code`` computes the gradient."""
    apply = function(lambda x, w: x * w, lambda g, x, w, y: (g * w, code(g, x)))
    return lambda net, h: apply(h, net.scale)


def weight_alone(code: Forward) -> Code:
    """A network with a Function of a weight; ``code`` computes the gradient."""
    apply = function(lambda w: w.round() + w, lambda g, w, y: code(g, w))
    return lambda net, h: h * apply(net.scale)


class Clipped(torch.autograd.Function):
    """A straight-through estimator, in the style of `setup_context`, with a number."""

    @staticmethod
    def forward(x: Tensor, bound: float) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = gradients[0].clone()
        found[x.abs() > ctx.bound] = 0
        return found, None


class Reverses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].neg() * ctx.strength, None


class Dense(torch.autograd.Function):
    """A linear layer, which computes the gradients that are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        found: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            found[0] = g @ weight
        if ctx.needs_input_grad[1]:
            found[1] = g.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            found[2] = g.sum(tuple(range(g.dim() - 1)))
        return tuple(found)


class Several(torch.autograd.Function):
    """Takes integers and a weight; has a result of booleans and one that samples share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(order, weight, (turned := x.t().contiguous()))
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x.gather(1, order) * turned.t(), positive, weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        order, weight, turned = ctx.saved_tensors
        x, g = turned.t(), gradients[0]
        found = torch.zeros_like(x).scatter_add(1, order, g * x) + g * x.gather(1, order)
        return found, None, torch.where(weight > 0, gradients[2], gradients[2] * 2) + gradients[2]


def several(net: Net, h: Tensor) -> Tensor:
    x, positive, weight = Several.apply(h, h.argsort(1), net.scale)
    return x * positive * weight


class Attends(torch.autograd.Function):
    """Keeps what it computes as attributes, and has samples in dimension 1 meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shares = x.transpose(0, 1).softmax(0)
        ctx.length = x.shape[1]
        return ctx.shares.transpose(0, 1) * ctx.length

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        g = gradients[0].transpose(0, 1) * ctx.shares * ctx.length
        return (g - ctx.shares * g.sum(0, keepdim=True)).transpose(0, 1)


def linear(s: Tensor) -> Tensor:
    """What is linear in a sum over samples, with all operators that count as such."""
    mask, table = torch.arange(8) > 3, torch.ones(8, 8, dtype=s.dtype).tril()
    found = -s + 2 * s / 3 - s.masked_fill(mask, 0) + torch.where(mask, s, torch.zeros_like(s))
    found = found + table @ s + (s.view(1, 8) @ table).squeeze(0) + s[None].expand(3, 8).sum(0)
    found = found + s.view(2, 4).t().reshape(8) + s.unsqueeze(1).transpose(0, 1)[0, :8].clone()
    found = found + torch.bmm(s.view(1, 1, 8), table[None]).view(8).contiguous()
    return found.mul_(2)


COPIED = function(torch.clone, lambda g, x, y: g)

APART: dict[str, Code] = {
    "rounds": lambda net, h: Clipped.apply(h * 3, 1.5),
    "reverses": lambda net, h: Reverses.apply(h, 0.5),
    "swish": both(
        lambda x: x * x.sigmoid(), lambda g, x, y: g * x.sigmoid() * (1 + x * (1 - x.sigmoid()))
    ),
    "swish of MONAI": lambda net, h: SWISH(h),
    "twice": lambda net, h: SWISH(SWISH(h)) + h,
    "checkpointed": in_checkpoint(lambda net, h: SWISH(h)),
    "nested": both(lambda x: SWISH(x) * 2, lambda g, x, y: g * y),
    "weight": of_weight(lambda g, x: (g * x).sum(0)),
    "larger gradient": of_weight(lambda g, x: g * x),
    "weight and steps": of_weight(lambda g, x: (g * x).mean(1).sum(0)),
    "linear in sums": of_weight(lambda g, x: linear((g * x).sum(0))),
    "products": of_weight(lambda g, x: torch.mv(g.t(), x[:, 0]) + g[:, 0].dot(x[:, 1])),
    "many products": of_weight(lambda g, x: torch.bmm(g.t()[None], x[None]).sum((0, 1))),
    "matrices": lambda net, h: Dense.apply(h, net.more, net.scale),
    "needs some": lambda net, h: Dense.apply(h, net.more.detach(), net.fixed),
    "several": several,
    "attributes": lambda net, h: Attends.apply(h),
    "weight alone": weight_alone(lambda g, w: g.clone().masked_fill_(w > 1, 0) / w.square().sum()),
    "weight alone, frozen": lambda net, h: h * COPIED(net.fixed),
    "no gradient": backward(lambda g, x: None),
}
"""Functions whose samples do not meet."""

OF_THREE = {"weight and steps", "matrices", "reverses"}
FAST = {"rounds", "swish of MONAI", "checkpointed", "matrices", "several", "weight alone"}
FAST |= {"centred gradients", "normed forwards", "mean for a weight", "square for a weight"}
FAST |= {"gradients are changed", "weight alone, clipped"}


def each(names: Iterable[str]) -> Any:
    """Parameters, those that are not `FAST` in the slow tier."""
    slow = pytest.mark.conformance
    marked = [name if name in FAST else pytest.param(name, marks=slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@each(APART)
def test_functions_whose_samples_stay_apart_are_split(name: str) -> None:
    assert why_whole(APART[name], *([3] if name in OF_THREE else [])) is None


def changes_gradient(g: Tensor, x: Tensor) -> Tensor:
    return g.mul_(2)


def changes_saved(g: Tensor, x: Tensor) -> Tensor:
    return g * x.mul_(2)


def changes_data(g: Tensor, x: Tensor) -> Tensor:
    x.data.mul_(2)
    return g * x


def eight_bits(g: Tensor, x: Tensor) -> Tensor:
    return (g * x).sum(0).to(torch.float8_e4m3fn).to(g.dtype)


class KeepsAMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mean = x.mean(0)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.mean


SHARES = function(lambda x, w: (x * 1, w * 2), lambda g, h, x, w, *_: (g + h.sum(), h * 2))


def filled(s: Tensor) -> Tensor:
    return s.masked_fill(torch.arange(8) > 3, 1.0)


MET: dict[str, tuple[Code, str]] = {
    "centred gradients": (backward(lambda g, x: g - g.mean(0)), "in its backward: mean"),
    "normed gradients": (backward(lambda g, x: g / (1 + g.norm())), "vector_norm"),
    "bounded gradients": (
        backward(lambda g, x: g * (1e3 / g.norm().clamp(min=1e3))),
        "in its backward: linalg_vector_norm",
    ),
    "normed forwards": (
        both(lambda x: x - x.mean(0), lambda g, x, y: g),
        "(mean)",
    ),
    "equal samples": (
        both(lambda x: x / (x[:, None] == x).all(2).sum(1, keepdim=True), lambda g, x, y: g),
        "(eq)",
    ),
    "checkpointed": (
        in_checkpoint(backward(lambda g, x: g - g.mean(0))),
        "in its backward: mean",
    ),
    "mean is kept": (lambda net, h: KeepsAMean.apply(h), "mean"),
    "others' gradients": (backward(lambda g, x: g.flip(0)), "in its backward: flip"),
    "divided by size": (backward(lambda g, x: g / len(x)), "in its backward: div"),
    "gradients are drawn": (backward(lambda g, x: g * torch.rand_like(g)), "random numbers"),
    "gradients are changed": (backward(changes_gradient), "changes what it is given"),
    "saved is changed": (backward(changes_saved), "changes what it is given"),
    "saved data is changed": (backward(changes_data), "changes what it is given"),
    "normalised gradients": (
        backward(lambda g, x: F.batch_norm(g, None, None, training=True)),
        "batch_norm",
    ),
    "any for a weight": (
        of_weight(lambda g, x: (x > 0).sum(0, dtype=torch.bool).to(x.dtype)),
        "in its backward: sum",
    ),
    "eight bits for a weight": (of_weight(eight_bits), "_to_copy"),
    "mean for a weight": (of_weight(lambda g, x: (g * x).mean(0)), "in its backward: mean"),
    "largest for a weight": (of_weight(lambda g, x: (g * x).amax(0)), "in its backward: amax"),
    "square for a weight": (of_weight(lambda g, x: (g * x).sum(0).square()), "backward: pow"),
    "product for a weight": (
        of_weight(lambda g, x: g.sum(0) * x.sum(0)),
        "in its backward: mul",
    ),
    "sum and one for a weight": (of_weight(lambda g, x: g.sum(0) + 1), "in its backward: add"),
    "a constant for a weight": (
        of_weight(lambda g, x: torch.ones(8, dtype=x.dtype)),
        "no sum over samples",
    ),
    "inverse for a weight": (of_weight(lambda g, x: 1 / g.sum(0)), "in its backward: reciprocal"),
    "rounded for a weight": (of_weight(lambda g, x: g.sum(0).int().double()), "_to_copy"),
    "filled for a weight": (of_weight(lambda g, x: filled(g.sum(0))), "masked_fill"),
    "clipped for a weight": (of_weight(lambda g, x: (g * x).sum(0).clamp(-1, 1)), "clamp"),
    "part of a weight's": (
        of_weight(lambda g, x: F.pad(g.sum(0)[len(x) :], (len(x), 0))),
        "in its backward",
    ),
    "weight alone, clipped": (weight_alone(lambda g, w: g / (1 + g.norm())), "vector_norm"),
    "result that all share": (
        lambda net, h: torch.mul(*SHARES(h, net.scale)),
        "in its backward",
    ),
}
"""Functions whose samples meet, or may, and the reason that is told."""


@each(MET)
def test_functions_whose_samples_may_meet_are_not_split(name: str) -> None:
    code, reason = MET[name]
    assert reason in str(why_whole(code))


# ---------------------------------------------------------------- custom operators


@torch.library.custom_op("lightning_hybrid_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda _, gradient: gradient / 2)


@pytest.mark.parametrize(
    "code",
    [
        lambda net, h: halved(h),
        lambda net, h: h * halved(net.scale),
        in_checkpoint(lambda net, h: h * halved(net.scale)),
    ],
    ids=["of samples", "of a weight", "checkpointed"],
)
def test_custom_operators_are_not_split(code: Code) -> None:
    assert "a custom operator: what it computes is not known" in str(why_whole(code))


def test_custom_operators_of_frozen_weights_are_split() -> None:
    assert why_whole(lambda net, h: h * halved(net.fixed)) is None
