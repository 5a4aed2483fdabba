"""A tensor that is marked by `requires_grad_` in `forward` has the effect that it has eagerly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capturing import Staged, outputs_and_gradients, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.capture import NotCaptured
from lightning_hybrid.graph import cut, make_stages, network_partitions

# (of regions whose inputs require no gradient, eagerly)
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
WORDS = torch.arange(12).view(4, 3)


def returns(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)


def marks(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(requires_grad=True)


class Adapted(nn.Module):
    """Frozen layers under activation checkpointing, some with adapters."""

    def __init__(self, reentrant: bool | None, adapted: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.requires_grad_(False)
        self.adapters = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in adapted})
        self.reentrant = reentrant

    def block(self, x: Tensor, number: int) -> Tensor:
        y = torch.tanh(self.layers[number](x))
        key = str(number)
        return x + y + self.adapters[key](y) if key in self.adapters else x + y

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for number in range(3):
            if self.reentrant is None:
                x = self.block(x, number)
            else:
                x = checkpoint(self.block, x, number, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("hook", [returns, marks, None])
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_gradients_are_those_of_autograd(hook: Callable[..., Any] | None, reentrant: bool) -> None:
    network = Adapted(reentrant).double()
    if hook is not None:
        network.table.register_forward_hook(hook)
    expected = outputs_and_gradients(network, network, WORDS)
    assert (expected[-1] is None) is (reentrant is True and hook is None)
    assert same(outputs_and_gradients(network, Staged(network), WORDS), expected)


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_a_mark_behind_a_region_without_gradients_counts(mark: bool, behind: bool) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=True)
            if mark:
                x.requires_grad_()
            if behind:
                x = checkpoint(lambda x: torch.tanh(self.second(x)), x, use_reentrant=True)
            return torch.tanh(self.second(x))

    network, x = Trained().double(), torch.rand(4, 6, dtype=torch.float64)
    expected = outputs_and_gradients(network, network, x)
    assert same(outputs_and_gradients(network, Staged(network), x), expected)


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_nothing_is_sent_back_to_frozen_stages_behind_a_mark(reentrant: bool | None) -> None:
    network = Adapted(reentrant, adapted=(2,))
    network.table.register_forward_hook(marks)
    staged = Staged(network)
    staged(WORDS)
    (graph,) = staged.graphs
    partitions = network_partitions(graph)
    codes = cut(graph, partitions, range(1, len(partitions)))
    values: list[Any] = graph.bind(staged.values)
    numbers = graph.values_of_numbers(graph.sizes(values))
    for stage in make_stages(codes, network, graph.device):
        values = stage(values, numbers)
        trains = any(parameter.requires_grad for parameter in stage.parameters())
        assert any(value.requires_grad for value in values) is trains


def test_marking_what_the_network_is_given_is_refused() -> None:
    class Thaws(Adapted):
        def forward(self, words: Tensor) -> Tensor:
            self.layers[0].weight.requires_grad_()
            self.table(words).requires_grad_()
            return super().forward(words)

    with pytest.raises(NotCaptured, match="changes requires_grad of a tensor that it is given"):
        Staged(Thaws(None))(WORDS)
