from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from captured_networks import ResNet, Tied, UNet
from capturing import graph_of
from torch import Tensor, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, NetworkPartition, find_boundary, network_partitions
from lightning_hybrid.graph.cuts_and_crossings import Cuts


@cache
def resnet_graph() -> NetworkGraph:
    return graph_of(ResNet(), torch.ones(2, 1, 16, 16, 16))


def resnet_partitions() -> tuple[NetworkPartition, ...]:
    return network_partitions(resnet_graph())


def test_each_main_convolution_of_a_resnet_is_one_partition() -> None:
    partitions = resnet_partitions()
    blocks = [f"layer{i}.{j}.conv{k}" for i in (1, 2, 3, 4) for j in (0, 1) for k in (1, 2)]
    assert [p.name for p in partitions] == ["conv1", *blocks, "fc"]


def test_shortcut_convolution_goes_with_its_block() -> None:
    partition = resnet_partitions()[find_boundary(resnet_partitions(), "layer2.0.conv2")]
    assert "layer2.0.downsample.0" in partition.modules
    assert partition.modules[-2:] == ("layer2.0", "layer2.0.relu")


def test_convolution_load_is_counted_from_its_shape() -> None:
    first = resnet_partitions()[1]
    multiplications = 2 * 4 * 4 * 4**3 * 3**3  # B C_o C_i T H W K^3
    light = 1 + 2 * (2 * 4 * 4**3)  # norm with its counter, and ReLU
    assert first.flops == 2 * multiplications + light


def test_attention_load_is_that_of_its_two_matrix_products() -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, key)

    (partition,) = network_partitions(
        graph_of(Attention(), torch.ones(2, 3, 5, 4), torch.ones(2, 3, 7, 4))
    )
    assert partition.flops == 2 * (2 * 3) * 5 * 7 * (4 + 4)


def test_what_the_values_pick_costs_as_if_it_were_as_many_as_samples() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 5), nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            return self.two(h[h[:, 0] > 1e9])  # (none of them in this call)

    graph = graph_of(Picks(), torch.ones(4, 3))
    assert sum(layer.effects.flops for layer in graph.layers) == 2 * 4 * (3 * 5 + 5 * 7)
    assert Cuts(graph).bytes(len(graph.layers)) == 4 * 7 * 4


def test_bytes_at_a_cut_are_those_of_all_that_crosses() -> None:
    partitions = resnet_partitions()
    assert partitions[0].output_bytes == 2 * 4 * 4**3 * 4
    assert partitions[1].output_bytes == 2 * partitions[0].output_bytes  # and the shortcut
    assert partitions[-1].output_bytes == 2 * 2 * 4


def test_every_parameter_lies_in_one_partition() -> None:
    names = [name for p in resnet_partitions() for name in p.parameters]
    assert sorted(names) == sorted(name for name, _ in ResNet().named_parameters())


def test_no_cut_before_an_in_place_layer() -> None:
    graph = resnet_graph()
    place = next(i for i, layer in enumerate(graph.layers) if layer.module == "relu")
    assert "changes it in place" in (Cuts(graph).refusal(place) or "")
    assert Cuts(graph).refusal(place + 1) is None


class ChangesView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        part = y[:, :2]
        z = self.two(y.clone())
        part[:, 0] = 1
        return y + z


def test_no_cut_where_a_view_of_what_crosses_changes_later() -> None:
    (partition,) = network_partitions(graph_of(ChangesView(), torch.ones(2, 4)))
    assert partition.refused[0][0] == "two"
    assert "changes it in place" in partition.refused[0][1]


class Pieces(nn.Module):
    """Returns two views of one tensor.

    Args:
        views: makes them.
    """

    def __init__(self, views: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.views = views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = self.one(x)
        return self.two(made + 1), *self.views(made)


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.split(2, dim=-1)
    return first, second.transpose(0, 1)


def sliced(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.split(2, dim=-1)[0], x[:, 1:]


@pytest.mark.parametrize("views", [turned, lambda x: x.chunk(2, 1), lambda x: x.view(-1).chunk(2)])
def test_outputs_that_cannot_overlap_may_be_cut_apart(views: Any) -> None:
    assert len(network_partitions(graph_of(Pieces(views), torch.ones(2, 4)))) == 2


@pytest.mark.parametrize(
    "views", [sliced, lambda x: x.unfold(1, 3, 1).unbind(1), lambda x: x.expand(2, 2, 4).unbind(0)]
)
def test_outputs_that_may_overlap_stay_in_one_memory(views: Any) -> None:
    [partition] = network_partitions(graph_of(Pieces(views), torch.ones(2, 4)))
    assert "share its memory" in partition.refused[0][1]


def test_tied_parameters_may_be_cut_apart() -> None:
    partitions = network_partitions(graph_of(Tied(), torch.ones(2, 4)))
    users = [p.name for p in partitions if "encode.weight" in p.parameters]
    assert len(users) == 2
    assert partitions[find_boundary(partitions, "middle")].name == "middle"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv3d(4, 4, 1) for _ in range(3))
        self.o = nn.Conv3d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).flatten(2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q.transpose(1, 2) @ k, dim=-1)
        return x + self.o((v @ weights.transpose(1, 2)).view(x.shape))


def test_queries_keys_and_values_are_one_partition() -> None:
    network = nn.Sequential(nn.Conv3d(1, 4, 3), Attention(), nn.Conv3d(4, 1, 3))
    partitions = network_partitions(graph_of(network, torch.ones(2, 1, 8, 8, 8)))
    assert [p.name for p in partitions] == ["0", "1.q", "1.o", "2"]


def test_boundary_is_found_by_the_name_of_any_module_that_begins_there() -> None:
    partitions = resnet_partitions()
    for name in ("layer3", "layer3.0", "layer3.0.conv1"):
        assert partitions[find_boundary(partitions, name)].name == "layer3.0.conv1"


class BeginsWithNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.trained(x)


class BeginsWithVmap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.trained = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = torch.vmap(lambda row: row * self.weight)(x)
        return self.trained(scaled)


@pytest.mark.parametrize("block", [BeginsWithNoGrad, BeginsWithVmap])
def test_a_block_that_begins_with_a_switch_is_found_by_its_name(block: type[nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), block(), nn.Tanh())
    graph = graph_of(network, torch.ones(2, 3))
    partitions = network_partitions(graph)
    boundary = find_boundary(partitions, "2")
    assert partitions[boundary - 1].modules[-1] == "1"
    assert not any(name.startswith("2") for name in partitions[boundary - 1].modules)


def test_cuts_may_leave_the_items_of_lists_of_modules_whole() -> None:
    partitions = network_partitions(resnet_graph(), whole_blocks=True)
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert [p.name for p in partitions] == ["conv1", *(f"{b}.conv1" for b in blocks), "fc"]
    assert sum(p.flops for p in partitions) == sum(p.flops for p in resnet_partitions())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layer33", "no such module.*'layer3'"),
        ("layer3.0.bn1", "inside partition 'layer3.0.conv1'"),
        ("conv1", "the network begins there"),
    ],
)
def test_unknown_boundary_says_what_is_close(name: str, text: str) -> None:
    with pytest.raises(NetworkError, match=text):
        find_boundary(resnet_partitions(), name)


def test_skips_cross_every_cut_on_their_way() -> None:
    graph = graph_of(UNet(), torch.ones(2, 1, 8, 8))
    crossing = [len(Cuts(graph).crossing(p.start)) for p in network_partitions(graph)[1:]]
    assert crossing[:3] == [1, 2, 2]
