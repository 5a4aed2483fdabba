"""Networks that are whole on no rank: what a rank makes when it gets its stages."""

import pytest
import torch
from torch import nn

from lightning_hybrid.comm import Coordinates
from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import is_of_one_rank, is_offloaded, is_vacant, offload
from lightning_hybrid.remote.deferred_maker import DeferredMaker
from lightning_hybrid.stage.staged_network import tensors_of
from lightning_hybrid.state.deferred_weights import Takeover


def layers() -> nn.Module:
    """Three layers, the first and the last of which share a matrix."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    network[2].weight = network[0].weight
    return network


def taken(number: int, *, vacates: bool = True) -> nn.Module:
    """The module of a worker that has got one of the layers as its stage."""
    module = nn.Module()
    with DeferredMaker(torch.device("cpu")).building(module):
        module.net = layers()
    take(module, number, vacates=vacates)
    return module


def take(module: nn.Module, number: int, *, vacates: bool = True) -> None:
    names, here = [f"net.{number}.weight", f"net.{number}.bias"], Coordinates(1, 1, 4)
    tied = {"net.0.weight"}
    Takeover(module, names, tensors_of(module), here, vacates=vacates, tied=tied).check_complete(())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_ranks_that_use_a_tied_weight_have_copies_and_others_know_it(number: int) -> None:
    module, expected = taken(number), layers()
    tied = module.net[0].weight
    assert module.net[2].weight is tied
    assert type(tied) is nn.Parameter
    assert not is_of_one_rank(tied)
    assert is_vacant(tied) is (number == 1)
    if number != 1:
        assert torch.equal(tied, expected[0].weight)
    for other in range(3):
        assert is_offloaded(module.net[other].bias) is (other != number)
    assert is_of_one_rank(module.net[number].bias)
    assert torch.equal(module.net[number].bias, expected[number].bias)


def test_in_an_evaluation_every_rank_has_a_tied_weight() -> None:
    assert torch.equal(taken(1, vacates=False).net[0].weight, layers()[0].weight)


def test_a_weight_that_one_rank_has_already_cannot_be_tied_later() -> None:
    module = taken(1)
    offload(module.net[0].weight, "net.0.weight", "on rank 3")
    with pytest.raises(DeferredError, match=r"'net\.0\.weight' is on rank 3"):
        take(module, 1)
