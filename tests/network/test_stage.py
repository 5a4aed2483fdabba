from copy import deepcopy
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traced_networks import (
    Around,
    DataclassOutput,
    FunctionalDropout,
    ResNet,
    Scaled,
    TwoInputs,
    UNet,
    ValueControl,
)

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network import cut, network_partitions, trace
from lightning_hybrid.network.check import run
from lightning_hybrid.network.structure import tensors_in

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def calls() -> dict[str, Call]:
    kwargs = {"table": torch.randn(3, 3), "weights": torch.randn(2)}
    return {
        "resnet": (ResNet(blocks=(1, 1)), (torch.randn(2, 1, 16, 16, 16),), {}),
        "unet": (UNet(), (torch.randn(2, 1, 9, 8),), {}),
        "two inputs": (TwoInputs(), (torch.randn(3, 1, 8, 8),), kwargs),
        "dataclass": (DataclassOutput(), (torch.randn(2, 3),), {}),
        "dropout": (FunctionalDropout(), (torch.randn(9, 4),), {}),
        "direct": (Scaled(), (torch.randn(2, 4),), {}),
        "opaque": (Around(ValueControl()), (torch.randn(2, 4),), {}),
    }


def outputs_and_gradients(network: nn.Module, call: Any) -> list[Tensor]:
    torch.manual_seed(0)
    outputs = [value for _, value in tensors_in(call())]
    sum(value.square().sum() for value in outputs if value.requires_grad).backward()
    return [*outputs, *(p.grad for p in network.parameters()), *network.buffers()]


@pytest.mark.parametrize("name", list(calls()))
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_stages_compute_what_the_network_computes(name: str, stages: int, training: bool) -> None:
    network, args, kwargs = calls()[name]
    network.train(training)
    graph = trace(network, args, kwargs)
    partitions = network_partitions(graph)
    boundaries = sorted({round(len(partitions) * k / stages) for k in range(1, stages)} - {0})
    chain = cut(graph, partitions, boundaries[: len(partitions) - 1])
    twin = deepcopy(network)
    expected = outputs_and_gradients(twin, lambda: twin(*args, **kwargs))
    found = outputs_and_gradients(network, lambda: graph.pack(run(chain, graph.bind(args, kwargs))))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_every_cut_stitches() -> None:
    network, x = ResNet(blocks=(1, 1)).eval(), torch.randn(2, 1, 16, 16, 16)
    graph = trace(network, (x,))
    partitions = network_partitions(graph)
    chain = cut(graph, partitions, range(1, len(partitions)))
    assert torch.equal(run(chain, [x])[0], network(x))
    names = [name for stage in chain for name in stage.parameter_names]
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())


def test_stages_hold_the_network_s_own_modules() -> None:
    network = ResNet(blocks=(1, 1))
    graph = trace(network, (torch.ones(2, 1, 16, 16, 16),))
    keys = list(network.state_dict())
    first, second = cut(graph, network_partitions(graph), [1])
    assert first.network_modules[0] is network.conv1
    assert next(iter(first.parameters())) is network.conv1.weight
    assert not list(second.children())
    assert list(network.state_dict()) == keys


def test_size_arithmetic_is_done_again_in_the_stage_that_needs_it() -> None:
    network = Scaled()
    graph = trace(network, (torch.ones(3, 4),))
    chain = cut(graph, network_partitions(graph), [1])
    x = torch.randn(5, 4)
    values = chain[0]([x])
    assert len(values) == 1
    assert torch.equal(chain[1](values)[0], network(x)[0])


def test_parameter_read_directly_belongs_to_the_stage_that_reads_it() -> None:
    graph = trace(FirstScaled(), (torch.ones(3, 4),))
    first, second = cut(graph, network_partitions(graph), [1])
    assert first.parameter_names == ("scale", "one.weight", "one.bias")
    assert second.parameter_names == ("two.weight", "two.bias")
    assert first.buffer_names == ("shift",)


class FirstScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) * self.scale + self.shift)


@pytest.mark.parametrize("boundaries", [[0], [2, 1], [99], [1, 1]])
def test_wrong_boundaries_are_refused(boundaries: list[int]) -> None:
    graph = trace(Scaled(), (torch.ones(3, 4),))
    with pytest.raises(NetworkError, match="must rise and lie in"):
        cut(graph, network_partitions(graph), boundaries)


def test_moving_a_stage_moves_what_it_uses_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Scaled()
    graph = trace(network, (torch.ones(3, 4),))
    second = cut(graph, network_partitions(graph), [1])[1]
    parameter, before = network.two.weight, deepcopy(network)
    monkeypatch.setattr(Tensor, "to", lambda value, device: value * 2)  # there is one device here
    second.move("other")
    assert network.two.weight is parameter
    for name in ("two.weight", "scale", "shift", "constant"):
        moved, old = (attrgetter(name)(net).detach() for net in (network, before))
        assert torch.equal(moved, old * 2)
    assert torch.equal(network.one.weight, before.one.weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
def test_a_compiled_stage_keeps_its_modules_and_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    light = partial(torch.compile, backend="aot_eager")  # Inductor needs half a minute of g++
    monkeypatch.setattr(torch, "compile", lambda code, dynamic, options: light(code))
    network = FunctionalDropout()
    graph = trace(network, (torch.ones(3, 4),))
    chain, names = cut(graph, network_partitions(graph), [1]), list(network.state_dict())
    for training in (True, False):
        for batch in (3, 2):
            network.train(training)
            x = torch.randn(batch, 4)
            expected = outputs_and_gradients(network, lambda x=x: network(x))
            network.zero_grad()
            for stage in chain:
                stage.compile_code()
            found = outputs_and_gradients(network, lambda x=x: run(chain, [x]))
            network.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert list(network.state_dict()) == names
