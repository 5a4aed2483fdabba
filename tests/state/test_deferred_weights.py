"""Networks that are whole on no rank: what a driver makes when it gets a stage, and sends."""

import pytest
import torch
from torch import nn

from lightning_hybrid.remote.deferred import is_deferred, is_of_one_rank, is_offloaded
from lightning_hybrid.remote.deferred_maker import DeferredMaker
from lightning_hybrid.remote.proxies import RemoteGradients
from lightning_hybrid.stage.staged_network import tensors_of
from lightning_hybrid.state.deferred_weights import leave_to_worker, make_here, to_send


def layers() -> nn.Module:
    """Three layers, the first and the last of which share a matrix."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    return network


@pytest.fixture
def module() -> nn.Module:
    module = nn.Module()
    with DeferredMaker(torch.device("cpu")).building(module):
        module.net = layers()
    return module


def names(number: int) -> list[str]:
    return [f"net.{number}.weight", f"net.{number}.bias"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_driver_makes_its_stage_and_what_is_tied(module: nn.Module, number: int) -> None:
    expected = layers()
    make_here(module, names(number), ["net.0.weight"])
    tied = module.net[0].weight
    assert module.net[2].weight is tied
    assert type(tied) is nn.Parameter
    assert not is_of_one_rank(tied)
    assert torch.equal(tied, expected[0].weight)
    assert torch.equal(module.net[number].bias, expected[number].bias)
    assert all(is_deferred(module.net[other].bias) for other in {0, 1, 2} - {number})


def test_what_a_worker_gets_is_made_as_it_is_sent_by_replica_0_alone(module: nn.Module) -> None:
    tensors, expected = tensors_of(module), layers()
    make_here(module, names(2), ["net.0.weight"])
    sent = to_send(tensors, names(1))
    assert [*sent] == names(1)
    assert torch.equal(sent["net.1.bias"].detach() + 0, expected[1].bias)
    assert to_send(tensors, names(1), makes=False) == {}
    leave_to_worker(tensors, names(1), "on rank 1", RemoteGradients.__new__(RemoteGradients))
    assert all(is_offloaded(tensors[name]) for name in names(1))
    assert to_send(tensors, names(1)) == {}
