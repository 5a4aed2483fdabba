"""3D-ResAttNet in network partitions: one Conv block each, cut inside of residual blocks."""

from functools import cache

import pytest
import torch
from capturing import graph_of
from torch import nn

from lightning_hybrid.graph import NetworkGraph, cut, find_boundary, make_stages, network_partitions
from lightning_hybrid.graph.cuts_and_crossings import Cuts
from lightning_hybrid.stage.stage_check import run
from models import ResAttNet3D


@cache
def graph_of_depth(depth: int) -> NetworkGraph:
    torch.manual_seed(0)
    return graph_of(ResAttNet3D(depth).eval(), torch.randn(2, 1, 24, 24, 24))


def main_convolutions(depth: int) -> list[str]:
    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}[depth]
    return ["stem.conv"] + [
        f"layer{i}.{j}.conv{k}"
        for i, count in enumerate(blocks, 1)
        for j in range(count)
        for k in (1, 2)
    ]


@pytest.mark.conformance
@pytest.mark.parametrize(("depth", "count"), [(18, 17), (34, 33)])
def test_each_main_convolution_begins_a_partition(depth: int, count: int) -> None:
    names = [p.name for p in network_partitions(graph_of_depth(depth))]
    assert len(main_convolutions(depth)) == count
    assert [name for name in names if "conv" in name.rpartition(".")[2]] == main_convolutions(depth)


@pytest.mark.parametrize("depth", [18, pytest.param(34, marks=pytest.mark.conformance)])
def test_a_conv_block_is_convolution_norm_and_relu(depth: int) -> None:
    graph = graph_of_depth(depth)
    partitions = network_partitions(graph)
    for name in main_convolutions(depth)[1::2]:  # the first of each residual block
        (partition,) = (p for p in partitions if p.name == name)
        kinds = [
            type(graph.network.get_submodule(layer.module))
            for layer in graph.layers[partition.start : partition.stop]
            if layer.is_module
        ]
        assert kinds == [nn.Conv3d, nn.BatchNorm3d, nn.ReLU]


@pytest.mark.parametrize("depth", [18, pytest.param(34, marks=pytest.mark.conformance)])
def test_a_cut_inside_a_residual_block_carries_its_skip_tensor(depth: int) -> None:
    graph = graph_of_depth(depth)
    cuts, partitions = Cuts(graph), network_partitions(graph)
    for name in main_convolutions(depth)[2::2]:  # the second of each block
        before = partitions[find_boundary(partitions, name) - 1]
        assert len(cuts.crossing(before.stop)) == 2  # the values, and the skip around them
        assert len(cuts.crossing(before.start)) == 1  # before the block nothing goes around


def test_cutting_inside_of_every_residual_block_changes_no_bit() -> None:
    graph = graph_of_depth(18)
    partitions = network_partitions(graph)
    inside = [find_boundary(partitions, name) for name in main_convolutions(18)[2::2]]
    x = torch.randn(2, 1, 24, 24, 24)
    stages = make_stages(cut(graph, partitions, inside), graph.network, torch.device("cpu"))
    assert len(stages) == 9
    (found,) = run(graph, stages, [x])
    assert torch.equal(found, graph.network(x))
