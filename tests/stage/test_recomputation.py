"""A forward that keeps no activations and runs again gives the same numbers in less memory."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from capturing import graph_of
from torch import Tensor, nn

from lightning_hybrid.graph import Stage, cut, make_stages, network_partitions
from lightning_hybrid.stage.random_numbers import random_state, set_random_state
from lightning_hybrid.stage.recomputation import again, forward

X = torch.randn(4, 3, dtype=torch.float64)
CPU = torch.device("cpu")


class WritesIntoItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.layer(x).tanh()


NETWORKS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3)),
    "normalised": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
    "writes": WritesIntoItsInput,
}


def stage_of(module: nn.Module) -> Stage:
    graph = graph_of(deepcopy(module), X.clone())
    (stage,) = make_stages(cut(graph, network_partitions(graph), []), module, CPU)
    return stage


def step(outputs: list[Any], module: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs[0].square().sum(), list(module.parameters()))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_buffers_are_those_of_a_forward_that_ran_once(name: str) -> None:
    torch.manual_seed(0)
    module = NETWORKS[name]().double()
    reference = deepcopy(module)
    one = stage_of(module)
    states = random_state(CPU)
    expected = reference(X.clone())
    after = random_state(CPU)
    set_random_state(states, CPU)
    outputs, recipe = forward(one, [X.clone()], (), states)
    assert torch.equal(outputs[0], expected)
    torch.rand(7)  # the generator has gone on meanwhile
    for _ in range(2):  # a graph may be gone back through twice
        set_random_state(recipe.states, CPU)
        _, again_outputs = again(one, recipe, ())
        assert all(torch.equal(a, b) for a, b in zip(random_state(CPU), after))
        found = step(again_outputs, module)
    for mine, theirs in zip(found, step([expected], reference)):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(module.buffers(), reference.buffers()):
        assert torch.equal(mine, theirs)


def test_no_activation_is_held_between_the_two() -> None:
    module = nn.Sequential(*[nn.Tanh() for _ in range(5)]).double()
    stage, held = stage_of(module), list[Tensor]()
    leaf = X.clone().requires_grad_()
    outputs, recipe = forward(stage, [leaf], (), [])
    assert recipe.values == [leaf]
    with pytest.raises(AssertionError, match="runs again"):
        outputs[0].sum().backward()
    [values], results = again(stage, recipe, ())
    held.append(torch.autograd.grad(results[0].sum(), values)[0])
    expected = torch.autograd.grad(module(leaf).sum(), leaf)[0]
    assert torch.equal(held[0], expected)
