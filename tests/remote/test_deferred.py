"""Tensors without memory on this rank are read, looked at, made and given up."""

import copy
import io
import pickle
from contextlib import ExitStack

import pytest
import torch
from deferring import build, made, pair
from torch import Tensor, nn

from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferred import (
    is_deferred,
    is_offloaded,
    materialized_with,
    offload,
    value_of,
)


def test_looking_and_running_make_nothing_for_good() -> None:
    net, expected = build(pair)[0], made(pair)
    x = torch.ones(2, 4)
    weight = net[0].weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((5, 4), torch.float32, "cpu")
    with torch.no_grad():
        assert torch.equal(net(x), expected(x))
        assert weight.norm().item() == expected[0].weight.norm().item()
        assert weight.tolist() == expected[0].weight.tolist()
    net.cpu()
    assert all(map(is_deferred, net.parameters()))


def test_what_asks_for_the_memory_of_tensors_finds_memory_of_their_own() -> None:
    net, expected = build(pair)[0], made(pair)
    places = [parameter.untyped_storage().data_ptr() for parameter in net.parameters()]
    assert places == [parameter.data_ptr() for parameter in net.parameters()]
    assert len({*places}) == len([*net.parameters()])
    assert not any(map(is_deferred, net.parameters()))
    for found, value in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, value)


def test_copies_and_pickles_are_ordinary_tensors() -> None:
    net, expected = build(pair)[0], made(pair)
    copied = copy.deepcopy(net)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for key, value in expected.state_dict().items():
        for found in (copied.state_dict()[key], read[key], pickle.loads(pickle.dumps(net))):
            tensor = found.state_dict()[key] if isinstance(found, nn.Module) else found
            assert not is_deferred(tensor)
            assert torch.equal(tensor, value)
    assert all(map(is_deferred, net.parameters()))


def test_what_is_written_to_or_trained_is_made_for_good() -> None:
    net, _ = build(pair)
    first, second = net[0].weight, net[1].weight
    view = first.data
    nn.init.ones_(view[1:3])
    assert torch.equal(first[1:3], torch.ones(2, 4))
    hooked: list[Tensor] = []
    second.register_post_accumulate_grad_hook(hooked.append)
    (second * 2).sum().backward()
    assert torch.equal(second.grad, torch.full((3, 5), 2.0))
    assert hooked == [second]
    assert is_deferred(net[0].bias)


def test_a_tensor_of_another_rank_says_where_it_is() -> None:
    net, _ = build(pair)
    offload(net[0].weight, "net.0.weight", "on rank 1")
    assert is_offloaded(net[0].weight)
    assert net[0].weight.shape == (5, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(DeferredError, match=r"'net.0.weight' is on rank 1.*full_state_dict"):
        net[0].weight.sum()
    with pytest.raises(DeferredError, match=r"net\.0\.weight"):
        net(torch.ones(1, 4))
    with materialized_with(net[0].weight, torch.ones(5, 4)):
        assert net.state_dict()["0.weight"].sum() == 20


def test_changes_inside_of_made_are_lost() -> None:
    net, expected = build(pair)[0], made(pair)
    with ExitStack() as stack, torch.no_grad():
        for parameter in net.parameters():
            stack.enter_context(materialized_with(parameter, value_of(parameter)))
        net[0].weight.zero_()
    assert torch.equal(value_of(net[0].weight), expected[0].weight)
