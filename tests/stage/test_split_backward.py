"""A backward in two parts adds up to one: compared with autograd's own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_hybrid.stage.split_backward import input_part

Outputs = Sequence[Tensor]


class Network(nn.Module):
    """What a function does with the module it is given, as in a stage: tensors in, tensors out."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *values: Tensor) -> Outputs:
        outputs = self.run(self, *values)
        return [outputs] if isinstance(outputs, Tensor) else outputs


def weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes))


def attention(size: int) -> nn.Module:
    return nn.TransformerEncoderLayer(size, 2, 8, dropout=0.1, batch_first=True)


SPLIT: dict[str, Callable[[], Network]] = {
    "chain": lambda: Network(lambda s, x: s.b(s.a(x).tanh()), a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
    "convolution and batch norm": lambda: Network(
        lambda s, x: s.net(x.view(3, 1, 2, 2)),
        net=nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)),
    ),
    "group norm": lambda: Network(lambda s, x: s.a(x.view(3, 4, 1, 1)), a=nn.GroupNorm(2, 4)),
    "residual": lambda: Network(lambda s, x: x + s.a(x).relu() * x, a=nn.Linear(4, 4)),
    "attention": lambda: Network(lambda s, x: s.a(x[None]), a=attention(4)),
    "added parameter": lambda: Network(lambda s, x: s.a(x + s.p), a=nn.Linear(4, 4), p=weight(4)),
    "computed weight": lambda: Network(
        lambda s, x: x @ (s.w / s.w.norm()).exp() @ s.v, w=weight(4, 4), v=weight(4, 4)
    ),
    "several outputs of one operation": lambda: Network(
        lambda s, x: [part.exp() for part in s.a(x).chunk(2, 1)], a=nn.Linear(4, 4)
    ),
    "what only passes through": lambda: Network(lambda s, x: (x, s.a(x)), a=nn.Linear(4, 4)),
    "twice the same output": lambda: Network(lambda s, x: [s.a(x)] * 2, a=nn.Linear(4, 4)),
    "frozen part": lambda: Network(
        lambda s, x: s.b(s.a(x)), a=nn.Linear(4, 4).requires_grad_(False), b=nn.Linear(4, 4)
    ),
    "nothing to train": lambda: Network(lambda s, x: x.exp()),
    "dropout": lambda: Network(lambda s, x: s.a(s.d(x)), a=nn.Linear(4, 4), d=nn.Dropout()),
}  # fmt: skip

Function = torch.autograd.Function


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x


WHOLE: dict[str, Callable[[], Network]] = {
    "operation of the user's": lambda: Network(lambda s, x: Doubled.apply(x, s.p), p=weight(3, 4)),
    "one weight twice on the way": lambda: Network(
        lambda s, x: s.a(s.a(x).tanh()), a=nn.Linear(4, 4)
    ),
    "two branches, one weight": lambda: Network(
        lambda s, x: (s.a(x), s.a(2 * x).exp()), a=nn.Linear(4, 4)
    ),
    "a weight, changed, as an output too": lambda: Network(
        lambda s, x: (x @ (e := s.p.exp()), e, e.sum()), p=weight(4, 4)
    ),
    "an output of weights alone": lambda: Network(
        lambda s, x: (s.a(x), s.p.exp() @ s.p), a=nn.Linear(4, 4), p=weight(4, 4)
    ),
    "a parameter returned": lambda: Network(
        lambda s, x: (s.a(x), s.p), a=nn.Linear(4, 4), p=weight(3)
    ),
    "recurrent layer": lambda: Network(
        lambda s, x: s.a(x[None])[0], a=nn.LSTM(4, 4, batch_first=True)
    ),
    "group norm with channels last": lambda: Network(
        lambda s, x: s.a(x.view(1, 3, 2, 2).to(memory_format=torch.channels_last)),
        a=nn.GroupNorm(3, 3),
    ),
}


def forward(network: Network, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    roots = [root for root in network(x) if root.requires_grad]
    torch.manual_seed(1)
    return x, roots, [torch.randn_like(root) for root in roots]


def edges(roots: Sequence[Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(root) for root in roots]


def gradients(network: Network) -> list[Tensor | None]:
    found = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_the_two_parts_give_the_gradients_of_a_backward(name: str) -> None:
    torch.manual_seed(2)
    network = SPLIT[name]().double()
    x, roots, starts = forward(network)
    torch.autograd.backward(roots, starts)
    expected, expected_x = gradients(network), x.grad

    x, roots, starts = forward(network)
    parts = input_part(edges(roots), starts, [x])
    assert parts is not None
    [found_x], rest = parts
    assert x.grad is None
    assert not any(g is not None for g in gradients(network))
    rest.run()
    torch.testing.assert_close(found_x, expected_x, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients(network), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_is_said_to_be_so_and_nothing_is_done(name: str) -> None:
    network = WHOLE[name]().double()
    x, roots, starts = forward(network)
    assert input_part(edges(roots), starts, [x]) is None
    assert not any(gradient is not None for gradient in gradients(network))
    torch.autograd.backward(roots, starts)  # the graph is whole


def test_the_first_part_does_no_work_for_weights() -> None:
    asked: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if "convolution_backward" in str(func):
                asked.append(str(args[-1]))
            return func(*args, **(kwargs or {}))

    network = Network(
        lambda s, x: s.b(s.a(x[None]).relu()), a=nn.Conv1d(3, 3, 1), b=nn.Conv1d(3, 3, 1)
    )
    x, roots, starts = forward(network.double())
    parts = input_part(edges(roots), starts, [x])
    assert parts is not None
    with Spy():
        parts[1].run()
    assert asked == [str([False, True, True])] * 2
    asked.clear()
    x, roots, starts = forward(network)
    with Spy():
        input_part(edges(roots), starts, [x])
    assert asked == [str([True, False, False])] * 2


def test_hooks_on_parameters_hear_of_a_gradient_once() -> None:
    network = SPLIT["chain"]().double()
    heard: list[str] = []
    for parameter in network.parameters():
        parameter.register_hook(lambda g: heard.append("before") or g * 2)
        parameter.register_post_accumulate_grad_hook(lambda p: heard.append("after"))
    x, roots, starts = forward(network)
    torch.autograd.backward(roots, starts)
    expected, once = gradients(network), [*heard]
    heard.clear()
    x, roots, starts = forward(network)
    parts = input_part(edges(roots), starts, [x])
    assert parts is not None
    assert not heard
    parts[1].run()
    assert sorted(heard) == sorted(once)
    for found, wanted in zip(gradients(network), expected):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_kept_graph_can_be_gone_through_again_in_parts() -> None:
    network = SPLIT["attention"]().double()
    x, roots, starts = forward(network)
    for _ in range(2):
        parts = input_part(edges(roots), starts, [x])
        assert parts is not None
        parts[1].run(keep=True)
    twice = gradients(network)
    torch.autograd.backward(roots, starts)
    for found, wanted in zip(twice, gradients(network)):
        torch.testing.assert_close(found, 2 * wanted, rtol=1e-12, atol=1e-12)  # type: ignore[operator]
