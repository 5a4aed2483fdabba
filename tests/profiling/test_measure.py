import itertools
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from captured_networks import ResNet
from capturing import graph_of
from torch import Tensor, nn

from lightning_hybrid.graph import NetworkGraph, network_partitions
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.profiling.measure import measure
from lightning_hybrid.profiling.network_table import count, states_of_partitions

# (the package has a function of that name)
measure_module = import_module("lightning_hybrid.profiling.measure")


def test_counted_profile_has_the_loads_of_the_partitions() -> None:
    graph = graph_of(ResNet(blocks=(1, 1)), torch.ones(2, 1, 16, 16, 16))
    partitions = network_partitions(graph)
    profile = count(graph, partitions)
    assert profile.names == [p.name for p in partitions]
    assert profile.loads == [3.0 * p.flops for p in partitions]
    assert profile.parameter_bytes[-1] == (8 * 2 + 2) * 4
    assert not profile.is_measured
    assert profile.batch == 2


def test_profile_survives_json() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4))
    profile = count(graph, network_partitions(graph))
    assert PartitionTable.from_record(profile.record()) == profile


def test_measuring_leaves_no_trace() -> None:
    network = ResNet(blocks=(1, 1))
    x = torch.randn(4, 1, 16, 16, 16)
    graph = graph_of(network, x)
    network.fc.bias.grad = torch.ones(2)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.get_rng_state()
    measure(graph, network_partitions(graph), [x], repeats=1)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(network.fc.bias.grad, torch.ones(2))
    assert network.conv1.weight.grad is None
    assert not x.requires_grad


@pytest.mark.parametrize(("tick_s", "rounds"), [(1e-6, 5), (0.06, 1), (0.03, 2)])
def test_what_takes_long_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tick_s: float, rounds: int
) -> None:
    ticks = itertools.count()
    module = sys.modules["lightning_hybrid.profiling.measure"]
    monkeypatch.setattr(module, "clock_of", lambda device: lambda: tick_s * next(ticks))
    x = torch.ones(2, 4)
    graph = graph_of(nn.Linear(4, 4), x)
    profile = measure(graph, network_partitions(graph), [x], repeats=5)
    assert next(ticks) == 4 * (1 + rounds)  # begin and end of a forward and of a backward
    assert profile.forward_s[0] == pytest.approx(tick_s)


def test_measured_profile_is_for_the_given_microbatch() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = graph_of(network, torch.ones(6, 4))
    partitions = network_partitions(graph)
    profile = measure(
        graph, partitions, [torch.ones(3, 4)], repeats=15
    )  # microseconds: one round is noise
    assert profile.batch == 3
    assert (profile.cut_bytes, profile.output_bytes) == ([3 * 8 * 4], 3 * 2 * 4)
    # the input of the first layer, and the ReLU's result (also the input of the second)
    assert profile.activation_bytes == [(3 * 4 + 3 * 8) * 4, 3 * 8 * 4]
    assert all((*profile.forward_s, *profile.backward_s))
    # nobody waits for the gradient of the network's inputs
    assert [part is None for part in profile.weight_part_s] == [True, False]
    assert profile.input_part_s[1]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.layer(x))


def test_the_parts_of_a_split_backward_are_measured_where_it_can_be_split() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Doubles())
    graph = graph_of(network, torch.ones(6, 4))
    profile = measure(graph, network_partitions(graph), [torch.ones(6, 4)], repeats=5)
    # of the first layer nobody waits for it
    assert [part is None for part in profile.weight_part_s] == [True, False, True]
    assert profile.input_part_s[1] > 0
    assert PartitionTable.from_record(profile.record()) == profile


def test_nothing_goes_back_through_frozen_layers_in_front() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    network[:2].requires_grad_(False)
    graph = graph_of(network, torch.ones(6, 4))
    profile = measure(graph, network_partitions(graph), [torch.ones(6, 4)], repeats=5)
    assert [seconds > 0 for seconds in profile.backward_s] == [False, False, True, True]
    assert [part is None for part in profile.weight_part_s] == [False, False, True, False]


def test_gradient_and_optimizer_bytes_are_those_of_trained_parameters() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    network[0].weight.requires_grad_(False)
    graph = graph_of(network, torch.ones(6, 4))
    partitions = network_partitions(graph)
    counted = count(graph, partitions)
    assert counted.parameter_bytes == [40 * 4, 18 * 4]
    assert counted.gradient_bytes == [8 * 4, 18 * 4]
    table = counted.with_optimizer(
        states_of_partitions(partitions, {"0.bias": 64, "2.weight": 128})
    )
    assert table.kept_bytes == [40 * 4 + 8 * 4 + 64, 2 * 72 + 128]
    assert table.held_bytes(3)[1] == 2 * 72 + 128 + 3 * table.activation_bytes[1]


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.relu(self.norm(self.one(x))))


def measured(monkeypatch: pytest.MonkeyPatch, graph: NetworkGraph) -> tuple[int, int]:
    """How many partitions there are, and how many of them were timed."""
    timed: list[Any] = []

    # (the package's `measure` is the function)
    module: Any = sys.modules["lightning_hybrid.profiling.measure"]

    def note(*_: Any, **__: Any) -> dict[str, float]:
        timed.append(None)
        return {"forward_s": 0.1, "backward_s": 0.2, "activation_bytes": 8}

    monkeypatch.setattr(module._Partition, "timed", note)
    partitions = network_partitions(graph)
    measure(graph, partitions, [torch.ones(3, 4)])
    return len(partitions), len(timed)


def test_equal_partitions_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = graph_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))), torch.ones(6, 4))
    # the first one has no gradient for its input
    assert measured(monkeypatch, layers) == (30, 2)
    # two in a block, through the first of which a skip connection passes
    blocks = graph_of(nn.Sequential(*(Skips() for _ in range(10))), torch.ones(6, 4))
    assert measured(monkeypatch, blocks) == (20, 3)
    # each returns one tensor more, which crosses all later cuts
    layers = graph_of(KeepsAll(), torch.ones(6, 4))
    assert measured(monkeypatch, layers) == (10, 2)


class KeepsAll(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(10)))

    def forward(self, x: Tensor) -> list[Tensor]:
        kept = [x]
        for layer in self:
            kept.append(layer(kept[-1]))
        return kept


def test_a_partition_that_is_measured_once_has_the_sizes_of_each() -> None:
    graph = graph_of(KeepsAll(), torch.ones(6, 4))
    table = measure(graph, network_partitions(graph), [torch.ones(3, 4)], repeats=1)
    # (all results so far cross a cut)
    assert table.cut_bytes == [n * 3 * 4 * 4 for n in range(1, 10)]
    assert table.output_bytes == 10 * 3 * 4 * 4


def test_no_hook_runs_while_measuring() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    graph = graph_of(network, torch.ones(6, 4))
    called: list[str] = []

    def note(*_: Any) -> None:
        called.append("hook")

    for module in network:
        module.register_forward_hook(note)
        module.register_forward_pre_hook(note)
        module.register_full_backward_hook(note)
    for parameter in network.parameters():
        parameter.register_hook(note)
        parameter.register_post_accumulate_grad_hook(note)
    everywhere = nn.modules.module.register_module_forward_hook(note)
    before = {name: (id(p), p.grad) for name, p in network.named_parameters()}
    measure(graph, network_partitions(graph), [torch.ones(3, 4)], repeats=1)
    everywhere.remove()
    assert called == []
    assert {name: (id(p), p.grad) for name, p in network.named_parameters()} == before
    network(torch.ones(3, 4, requires_grad=True)).sum().backward()
    # per module forward twice and once backward, per parameter two, and one for all modules
    assert len(called) == 4 * 3 + 6 * 2


@pytest.mark.parametrize("training", [True, False])
def test_a_network_is_measured_as_it_trains(training: bool) -> None:
    x, held = torch.ones(6, 4), {}
    for name, layer in (("dropout", nn.Dropout(0.5)), ("identity", nn.Identity())):
        network = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 2)).train(training)
        graph = graph_of(network, x)
        profile = measure(graph, network_partitions(graph), [x], repeats=1)
        held[name] = sum(profile.activation_bytes)
        assert all(module.training == training for module in network.modules())
    # its mask is kept while training only
    assert (held["dropout"] > held["identity"]) == training


def test_a_network_that_cannot_train_on_a_sample_is_measured_all_the_same() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    graph = graph_of(network, torch.ones(6, 4))
    profile = measure(graph, network_partitions(graph), [torch.ones(1, 4)], repeats=1)
    assert profile.batch == 1
    assert all(profile.forward_s)


def test_frozen_partition_has_no_backward() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).requires_grad_(False)
    graph = graph_of(network, torch.ones(6, 4))
    profile = measure(graph, network_partitions(graph), [torch.ones(6, 4)], repeats=1)
    assert profile.backward_s[0] == 0.0


def test_a_network_that_differentiates_inside_is_measured_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda y: self.first(y).tanh().sum())(x)

    graph = graph_of(Net(), torch.ones(2, 4))
    profile = measure(graph, network_partitions(graph), [torch.ones(2, 4)], repeats=1)
    assert profile.is_measured


@pytest.mark.parametrize("error", [None, KeyError])
def test_what_was_measured_on_an_accelerator_leaves_its_memory_to_the_stages(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    emptied: list[bool] = []

    def measured(*_: Any) -> None:
        assert not emptied
        if error is not None:
            raise error

    monkeypatch.setattr(measure_module, "_measure", measured)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(True))
    graph: Any = None
    with pytest.raises(error) if error else nullcontext():
        measure_module.measure(graph, [], [], device=torch.device("meta"))
    assert emptied == [True]
