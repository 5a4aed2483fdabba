"""A network's own Python runs on a copy, with the module's weights, and nothing is left of it."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_hybrid.driver.module_copy import ModuleCopy, RandomStates, WritesWeights

CPU = torch.device("cpu")
X = torch.arange(12.0).view(4, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.cell = nn.LSTM(3, 3, batch_first=True)
        self.calls, self.data = 0, TensorDataset(X)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]
        self.before: Tensor | None = None

    def forward(self, x: Tensor, scales: list[Tensor]) -> Tensor:
        self.calls += 1
        print("called")
        warnings.warn("a warning", stacklevel=1)
        x = self.norm(self.layer(x)) * self.mask * scales.pop()
        x, _ = self.cell(x[:, None])
        self.before = x
        return x


def call(net: Net) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net(X, [torch.full((3,), 2.0)])


def copied(net: Net, x: Tensor = X, **keywords: Any) -> tuple[ModuleCopy, list[Tensor]]:
    scales = [torch.ones(3), torch.full((3,), 2.0)]
    return ModuleCopy(nn.Module(), net, (x,), {"scales": scales}, **keywords), scales


def test_it_computes_what_the_module_computes_as_often_as_asked() -> None:
    net = Net()
    net.before = net.layer(X)  # not of a kind that `deepcopy` copies
    kept, scales = copied(net)
    expected = call(net)
    for _ in range(2):
        made, found, ((given,), keywords) = kept.call(CPU)
        assert torch.equal(found, expected)
        assert torch.equal(given, X)
        assert len(keywords["scales"]) == 1
        assert made.calls == 1
    assert len(scales) == 2


def test_nothing_is_left_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    versions = [p._version for p in net.parameters()]
    kept, _ = copied(net)
    made, found, _ = kept.call(CPU)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (net.calls, net.before) == (0, None)
    assert [p._version for p in net.parameters()] == versions
    assert all(p.grad is None for p in net.parameters())
    assert capsys.readouterr().out == ""
    assert found.requires_grad
    with pytest.raises(RuntimeError, match="it runs a backward"):
        found.sum().backward()
    assert made.layer.weight is net.layer.weight
    assert made.data is net.data


def test_of_a_part_tensors_of_the_batch_have_its_samples_wherever_they_are() -> None:
    net = Net().eval()
    kept, _ = copied(net, batched=[X, net.mask])
    assert kept.is_complete
    _, found, ((given,), _) = kept.call(CPU, lambda tensor: tensor[:2])
    assert len(given) == 2
    torch.testing.assert_close(found, call(net)[:2])
    kept, _ = copied(net, batched=[X, torch.ones(4, 1)])
    assert not kept.is_complete


class Writes(Net):
    def forward(self, x: Tensor, scales: list[Tensor]) -> Tensor:
        with torch.no_grad():
            self.layer.bias.add_(1)
        return self.layer(x)


def test_weights_that_it_writes_to_are_its_own_or_it_is_refused() -> None:
    net = Writes()
    bias = net.layer.bias.detach().clone()
    kept, _ = copied(net, writes=True)
    results = [kept.call(CPU)[1] for _ in range(2)]
    assert torch.equal(*results)
    assert torch.equal(net.layer.bias, bias)
    kept, _ = copied(net)
    with pytest.raises(WritesWeights, match="writes into its parameters"):
        kept.call(CPU)


class Draws(nn.Module):
    def forward(self) -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]


def test_it_draws_what_the_call_draws_and_generators_go_on_as_after_the_call() -> None:
    net, states = Draws(), RandomStates()
    kept = ModuleCopy(net, net, (), {})
    torch.manual_seed(1)
    state, drawn = torch.get_rng_state(), net()
    after = RandomStates()
    following = net()
    after._set()
    with states.again(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        _, found, _ = kept.call(CPU)
    assert found == drawn
    assert [random.random(), np.random.rand()] == following[:2]
