"""A forward that runs before its turn, with optimizer steps between it and its backward."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from capturing import graph_of
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import Stage, cut, make_stages, network_partitions
from lightning_hybrid.stage.early_forwards import EarlyForwards
from lightning_hybrid.stage.recomputation import Recipe, again

X = torch.randn(4, 3, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()


def stage_of(module: nn.Module) -> Stage:
    """All of a network; capturing it leaves its statistics as they are."""
    graph = graph_of(deepcopy(module), X)
    codes = cut(graph, network_partitions(graph), [])
    (stage,) = make_stages(codes, module, torch.device("cpu"))
    return stage


def change(module: nn.Module) -> None:
    """What an optimizer does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5).add_(0.1)


def gradients(module: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), list(module.parameters())))


def first(values: list[Any]) -> Tensor:
    output: Tensor = values[0]
    return output


@pytest.mark.parametrize("weights", ["stash", "recompute"])
def test_the_backward_meets_the_weights_that_it_is_to_meet(weights: Any) -> None:
    module, reference = network(), network()
    stage, early = stage_of(module), EarlyForwards(weights)
    outputs, kept = early.forward(1, stage, [X], (), [])
    expected = reference(X)
    torch.testing.assert_close(first(outputs), expected, rtol=0, atol=0)
    if weights == "recompute":
        assert isinstance(kept, Recipe)
        change(reference)
        expected = reference(X)
    change(module)
    if isinstance(kept, Recipe):
        _, outputs = again(stage, kept, ())
    found = gradients(module, first(outputs))
    for one, other in zip(found, gradients(reference, expected)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_weights_of_now_meet_the_activations_of_then() -> None:
    """Of a linear layer: its weights' gradients are of then, its inputs' of now."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    stage, early = stage_of(module), EarlyForwards("current")
    outputs, _ = early.forward(1, stage, [X], (), [])
    before = deepcopy(module)
    change(module)
    found = gradients(module, first(outputs))
    upstream = 2 * before(X)
    below = upstream @ module[1].weight
    for one, other in zip(
        found, (below.T @ X, below.sum(0), upstream.T @ before[0](X), upstream.sum(0))
    ):
        torch.testing.assert_close(one, other)


def test_buffers_are_those_of_the_forwards_that_had_their_turn() -> None:
    module, reference = network(), network()
    stage, early = stage_of(module), EarlyForwards("stash")
    norm: Any = module[2]
    start = norm.running_mean.clone()
    batches = [X, X + 1, X + 2]
    for number, batch in enumerate(batches):
        early.forward(number, stage, [batch], (), [])
    assert torch.equal(norm.running_mean, start)
    early.drop(2)
    for number, batch in enumerate(batches[:2]):
        reference(batch)
        early.commit(number, stage)
        torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=0, atol=0)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


def test_a_function_is_refused_where_weights_are_to_be_stashed() -> None:
    stage: Any = nn.Linear(3, 3).double()
    outputs = [Times.apply(X.clone().requires_grad_(), stage.bias).exp()]
    with pytest.raises(NetworkError, match=r"Times, an autograd.Function, may keep"):
        EarlyForwards("stash").refuse_functions(stage, outputs)
    for weights in ("recompute", "current", None):
        EarlyForwards(weights).refuse_functions(stage, outputs)  # type: ignore[arg-type]


@torch.library.custom_op("tests_of_early_forwards::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_autograd(lambda ctx, gradient: 2 * gradient)


def test_an_operator_with_a_backward_of_its_own_is_refused_there_too() -> None:
    stage: Any = nn.Linear(3, 3).double()
    with pytest.raises(NetworkError, match="may keep a parameter"):
        EarlyForwards("stash").refuse_functions(stage, [twice(stage(X)).exp()])
