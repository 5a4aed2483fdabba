import pytest
import torch
from torch import Tensor, nn
from traced_networks import FunctionalDropout, ResNet

from lightning_hybrid.errors import StitchError
from lightning_hybrid.network import check, cut, network_partitions, splits_along_batch, trace
from lightning_hybrid.network.check import run

HIDDEN = [2.0]


class ReadsGlobal(nn.Module):
    """Depends on something that tracing cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) * HIDDEN[0])


def test_check_accepts_stages_and_leaves_no_trace() -> None:
    network, x = ResNet(blocks=(1, 1)), torch.randn(2, 1, 16, 16, 16)
    graph = trace(network, (x,))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.get_rng_state()
    check(graph, cut(graph, network_partitions(graph), [3]), (x,))
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert network.training
    assert all(not m._forward_hooks for m in network.modules())


def test_check_compares_random_layers_on_the_same_numbers() -> None:
    network, x = FunctionalDropout(), torch.randn(9, 4)
    graph = trace(network, (x,))
    check(graph, cut(graph, network_partitions(graph), [1]), (x,))


def test_check_treats_nan_as_equal() -> None:
    network, x = FunctionalDropout().eval(), torch.full((2, 4), torch.nan)
    graph = trace(network, (x,))
    check(graph, cut(graph, network_partitions(graph), [1]), (x,))


def test_check_names_the_first_module_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = ReadsGlobal(), torch.randn(2, 4)
    graph = trace(network, (x,))
    stages = cut(graph, network_partitions(graph), [1])
    monkeypatch.setitem(globals(), "HIDDEN", [3.0])
    with pytest.raises(StitchError, match="first module whose output differs is 'two'"):
        check(graph, stages, (x,))


class Pooled(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.inner, self.keep = nn.Linear(4, 4), keep

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - x.mean(0) if self.keep else x.mean(0)


@pytest.mark.parametrize("keep", [True, False])
def test_network_that_mixes_samples_does_not_split(keep: bool) -> None:
    network, x = Pooled(keep), torch.randn(4, 4)
    assert not splits_along_batch(trace(network, (x,)), network, (x,), microbatches=2)


@pytest.mark.parametrize("as_stages", [True, False])
def test_network_with_batch_norm_splits_in_evaluation(as_stages: bool) -> None:
    network, x = ResNet(blocks=(1, 1)), torch.randn(5, 1, 16, 16, 16)
    graph = trace(network, (x,))
    chain = cut(graph, network_partitions(graph), [3])
    state = {name: value.clone() for name, value in network.state_dict().items()}
    assert splits_along_batch(graph, chain if as_stages else network, (x,), microbatches=3)
    assert network.training
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert len(run(chain, [x])) == 1
