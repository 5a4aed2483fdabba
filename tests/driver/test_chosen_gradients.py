"""Gradients of chosen weights, where a call of a network is one node of autograd."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid._torch.autograd import run_backwards_by
from lightning_hybrid.driver.backward_passes import UserBackwards
from lightning_hybrid.errors import NetworkError


class Call(torch.autograd.Function):
    """``weight * x``; the gradient of the weight is left where it is, as by a network's stages."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Any) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return weight[0].detach() * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        [weight] = ctx.weight
        found = (gradient * ctx.x).sum()
        weight.grad = found if weight.grad is None else weight.grad + found
        return None, gradient * weight.detach(), None


@pytest.fixture
def network() -> Iterator[Any]:
    weight = nn.Parameter(torch.tensor(2.0))
    leaf = torch.zeros((), requires_grad=True)
    network: Any = SimpleNamespace(
        name="net",
        leaf=leaf,
        weight=weight,
        weights=lambda: [weight],
        placement=SimpleNamespace(schedule="gpipe", devices=(1, 0)),
        weight_hooks=SimpleNamespace(names=list),
    )
    gradients: Any = SimpleNamespace(kept_local=nullcontext, bring_to_owners=lambda: None)
    hooks: Any = nullcontext
    run_backwards_by(UserBackwards([network], gradients, hooks))
    yield network
    run_backwards_by(None)


def test_a_chosen_gradient_is_that_of_the_loss_alone(network: Any) -> None:
    network.weight.grad = torch.tensor(100.0)
    loss = Call.apply(network.leaf.view_as(network.leaf), torch.tensor(3.0), [network.weight])
    [gradient] = torch.autograd.grad(loss + network.weight**2, network.weight)
    assert gradient == 3 + 2 * 2
    assert network.weight.grad == 100


def test_a_weight_that_a_loss_does_not_depend_on_is_an_error_as_on_one_device(network: Any) -> None:
    x = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(2 * x, [x, network.weight])
    found = torch.autograd.grad(2 * x, [x, network.weight], allow_unused=True)
    assert found[0] == 2
    assert found[1] is None


def test_a_backward_for_a_weight_gives_other_leaves_no_gradient(network: Any) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    Call.apply(network.leaf.view_as(network.leaf), x, [network.weight]).backward(
        inputs=[network.weight]
    )
    assert network.weight.grad == 3
    assert x.grad is None


def test_gradients_that_come_later_are_refused(network: Any) -> None:
    network.placement.schedule = "pipedream"
    with pytest.raises(NetworkError, match=r"of network 'net' arise some steps later.*'pipedream'"):
        torch.autograd.grad(2 * network.weight, network.weight)


def test_hooks_on_weights_would_hear_of_pieces(network: Any) -> None:
    network.weight_hooks.names = lambda: ["0.weight"]
    with pytest.raises(NetworkError, match=r"come in pieces, for each .* hook on '0\.weight'"):
        torch.autograd.grad(2 * network.weight, network.weight)


class Inner(torch.autograd.Function):
    """Takes gradients of weights in its own backward, as a stage does whose backward is split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            weight = torch.ones((), requires_grad=True)
            (2 * weight).backward(inputs=[weight])
        return gradient * weight.grad


def test_stages_that_take_gradients_layer_by_layer_ask_no_network_for_its_weights(
    network: Any,
) -> None:
    asked: list[None] = []
    network.weights = lambda: asked.append(None) or []
    x = torch.ones((), requires_grad=True)
    Inner.apply(x).backward()
    assert x.grad == 2
    assert not asked
