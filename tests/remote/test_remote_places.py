"""Proxies at their places in a module."""

import pytest
import torch
from owned_elsewhere import World
from torch import Tensor, nn

from lightning_hybrid.errors import HybridError
from lightning_hybrid.remote.hollow_network import NoMemory
from lightning_hybrid.remote.proxy import Kind


def test_names_are_told_by_kind(world: World) -> None:
    places = world.remote.places
    assert places.names(Kind.PARAMETER) == {n for n, _ in world.here.named_parameters()}
    assert places.names(Kind.BUFFER) == {n for n, _ in world.here.named_buffers()}
    assert places.names() == set(world.here.state_dict())


def test_a_replaced_buffer_is_told_once_and_is_a_proxy(world: World) -> None:
    world.here[1].running_mean = torch.zeros(4)
    assert [remote.name for remote in world.remote.places.replaced()] == ["1.running_mean"]
    assert type(world.here[1].running_mean) is not Tensor
    assert not list(world.remote.places.replaced())


def test_what_was_replaced_before_what_is_refused_has_been_told(world: World) -> None:
    world.here[1].running_mean = torch.zeros(4)
    world.here[1].running_var = None
    replaced = world.remote.places.replaced()
    assert next(replaced).name == "1.running_mean"
    with pytest.raises(HybridError, match=r"buffer '1\.running_var' was replaced by NoneType"):
        next(replaced)


def test_hidden_proxies_are_ordinary_tensors_until_they_are_shown(world: World) -> None:
    places, weight = world.remote.places, world.here[0].weight
    places.hide()
    assert type(weight) is nn.Parameter
    world.here[1].running_mean = torch.zeros(4)
    places.show()
    assert type(weight) is not nn.Parameter
    assert type(world.here[1].running_mean) is Tensor  # of which `replaced` tells


def test_tensors_are_emptied_and_come_back(world: World) -> None:
    weight, before = world.here[0].weight, world.there[0].weight.clone()
    with world.remote.places.emptied(), pytest.raises(NoMemory):
        weight.sum()
    assert torch.equal(weight, before)


def test_after_the_end_everything_is_ordinary(world: World) -> None:
    view = world.here[0].weight.data
    world.remote.places.close()
    assert type(view) is Tensor
    assert all(type(p) is nn.Parameter for p in world.here.parameters())
    assert not world.remote.places.names()
