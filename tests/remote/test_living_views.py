"""Tensors that show the memory of others are found wherever code keeps them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from owned_elsewhere import World
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.remote.living_views import in_one_memory, living_views
from lightning_hybrid.remote.proxy import RemoteKind

TAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "row": lambda p: p.detach()[0],
    "transposed": lambda p: p.detach().T,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_a_view_is_found_where_it_is_kept(take: Callable[[Tensor], Tensor]) -> None:
    parameter, other = nn.Parameter(torch.ones(2, 3)), torch.ones(3)
    kept: list[Any] = [{"here": take(parameter)}, other.detach()]
    found = living_views([parameter])
    assert all(owner is parameter for _, owner in found)
    assert any(view is kept[0]["here"] for view, _ in found)
    assert not any(view is kept[1] for view, _ in found)


def test_where_nothing_shares_memory_not_all_objects_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise AssertionError("looked at all objects")

    monkeypatch.setattr(gc, "get_objects", refuse)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2))
    network.load_state_dict(network.state_dict())
    assert not living_views([*network.parameters(), *network.buffers()])


def test_what_belongs_to_a_graph_is_not() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    kept = parameter[0]
    assert not living_views([parameter])
    assert kept.requires_grad


def test_a_view_taken_before_shows_and_changes_what_the_owner_has() -> None:
    kept: list[Tensor] = []
    world = World(lambda module: kept.append(module[0].weight.data[0]))
    assert torch.equal(kept[0].sum(), world.there[0].weight[0].sum())
    with torch.no_grad():
        world.there[0].weight.mul_(2)
    world.remote.outdate(RemoteKind.PARAMETER)
    assert torch.equal(kept[0].sum(), world.there[0].weight[0].sum())
    kept[0].zero_()
    world.remote.flush()
    assert not world.there[0].weight[0].any()
    world.remote.close()
    assert type(kept[0]) is Tensor


def test_parameters_in_one_memory_are_refused() -> None:
    def tie(module: nn.Sequential) -> None:
        module[2].weight.data = module[0].weight.data.view(3, 4)[:2]

    with pytest.raises(NetworkError, match=r"'0.weight' and '2.weight' are two tensors in one mem"):
        World(tie)


@pytest.mark.parametrize("wanted", [["weight"], ["last"]])
def test_only_memory_that_is_really_shared_counts(wanted: list[str]) -> None:
    flat = torch.zeros(10)
    weight, rest, last = nn.Parameter(flat[:4]), nn.Parameter(flat[4:]), flat[8:]
    tensors = {"weight": weight, "again": weight, "rest": rest}
    assert in_one_memory(tensors, ["weight", "rest"]) is None
    expected = ("last", "rest") if wanted == ["last"] else None
    assert in_one_memory(tensors | {"last": last}, wanted) == expected


def test_constants_may_share_their_memory() -> None:
    positions = torch.arange(10)
    assert in_one_memory({"all": positions, "some": positions[:5]}, ["all"]) is None
