import torch
from torch import nn
from traced_networks import ResNet

from lightning_hybrid.network import Profile, count, measure, network_partitions, trace


def test_counted_profile_has_the_loads_of_the_partitions() -> None:
    graph = trace(ResNet(blocks=(1, 1)), (torch.ones(2, 1, 16, 16, 16),))
    partitions = network_partitions(graph)
    profile = count(graph, partitions)
    assert [p.name for p in profile.partitions] == [p.name for p in partitions]
    assert profile.loads == tuple(3.0 * p.flops for p in partitions)
    assert profile.partitions[-1].parameter_bytes == (8 * 2 + 2) * 4
    assert profile.batch == 2


def test_profile_survives_json() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),))
    profile = count(graph, network_partitions(graph))
    assert Profile.from_json(profile.to_json()) == profile


def test_measuring_leaves_no_trace() -> None:
    network = ResNet(blocks=(1, 1))
    x = torch.randn(4, 1, 16, 16, 16)
    network.fc.bias.grad = torch.ones(2)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.get_rng_state()
    graph = trace(network, (x,))
    measure(graph, network_partitions(graph), [x], repeats=1)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(network.fc.bias.grad, torch.ones(2))
    assert network.conv1.weight.grad is None
    assert not x.requires_grad


def test_measured_profile_is_for_the_given_microbatch() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = trace(network, (torch.ones(6, 4),))
    partitions = network_partitions(graph)
    profile = measure(graph, partitions, [torch.ones(3, 4)], repeats=1)
    assert profile.batch == 3
    assert [p.output_bytes for p in profile.partitions] == [3 * 8 * 4, 3 * 2 * 4]
    assert [p.flops for p in profile.partitions] == [p.flops // 2 for p in partitions]
    # the input of the first layer, and the ReLU's result (also the input of the second)
    assert [p.activation_bytes for p in profile.partitions] == [(3 * 4 + 3 * 8) * 4, 3 * 8 * 4]
    assert all(p.forward_s and p.backward_s for p in profile.partitions)


def test_frozen_partition_has_no_backward() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    graph = trace(network, (torch.ones(6, 4),))
    profile = measure(graph, network_partitions(graph), [torch.ones(6, 4)], repeats=1)
    assert profile.partitions[0].backward_s == 0.0
