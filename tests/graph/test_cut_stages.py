from collections.abc import Callable
from copy import deepcopy
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from captured_networks import (
    Around,
    DataclassOutput,
    DropPath,
    FunctionalDropout,
    Remembering,
    ResNet,
    Scaled,
    Tied,
    TwoInputs,
    UNet,
)
from capturing import Staged, captured, everywhere, graph_of, outputs_and_gradients, same
from torch import Tensor, fx, nn

from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import NetworkGraph, Stage, cut, make_stages, network_partitions
from lightning_hybrid.graph.cut_stages import cut_at
from lightning_hybrid.graph.stage_code import GraphCode
from lightning_hybrid.stage.stage_check import run

CPU = torch.device("cpu")
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
        "tied": (Tied(), (torch.randn(2, 4),), {}),
        "remembering": (Around(Remembering()), (torch.randn(2, 4),), {}),
        "stochastic depth": (Around(DropPath()), (torch.randn(2, 4),), {}),
    }


@pytest.mark.parametrize("name", list(calls()))
@pytest.mark.parametrize("training", [True, False])
def test_stages_compute_what_the_network_computes(name: str, training: bool) -> None:
    network, args, kwargs = calls()[name]
    twin = deepcopy(network.train(training))

    def thirds(partitions: Any) -> list[int]:
        count = len(partitions)
        return sorted({round(count * k / 3) for k in (1, 2)} - {0, count})

    expected = outputs_and_gradients(twin, twin, *args, **kwargs)
    found = outputs_and_gradients(network, Staged(network, thirds), *args, **kwargs)
    assert same(found, expected)


def test_every_cut_stitches() -> None:
    network, x = ResNet(blocks=(1, 1)).eval(), torch.randn(2, 1, 16, 16, 16)
    staged = Staged(network, everywhere)
    assert torch.equal(staged(x), network(x))
    (codes,) = staged.codes.values()
    names = [
        name for stage in make_stages(codes, network, CPU) for name, _ in stage.named_parameters()
    ]
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())


class Cell(nn.Module):
    """Takes and returns its states in another order than it computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, b: Tensor, unused: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        a = torch.tanh(self.first(x) + a)
        b = torch.tanh(self.second(a) + b)
        return self.out(b), a, b


@pytest.mark.parametrize("ends", ["begin begin", "begin end", "end end", "begin 2", "2 end"])
def test_stages_without_layers_pass_on_what_crosses(ends: str) -> None:
    values = [torch.full((3, 4), float(number)) for number in range(4)]
    found = captured(Cell(), *values)
    where = {"begin": 0, "2": 2, "end": len(found.graph.layers)}
    codes = cut_at(found.graph, [where[end] for end in ends.split()])
    outputs = run(found.graph, make_stages(codes, found.graph.network, CPU), found.leaves)
    assert same(outputs, list(found.returned))


def test_stages_take_the_network_s_own_parameters() -> None:
    network = ResNet(blocks=(1, 1))
    first, second = staged_pair(network, torch.ones(2, 1, 16, 16, 16))
    assert next(iter(first.parameters())) is network.conv1.weight
    assert {id(p) for p in second.parameters()} < {id(p) for p in network.parameters()}
    network.conv1.weight = nn.Parameter(torch.zeros_like(network.conv1.weight))
    assert next(iter(first.parameters())) is network.conv1.weight


def staged_pair(network: nn.Module, *args: Any) -> list[Stage]:
    """The network cut before its second partition."""
    graph = graph_of(network, *args)
    return make_stages(cut(graph, network_partitions(graph), [1]), network, CPU)


class OneOfTwo(nn.Module):
    """Uses one of two adapters behind each layer, and never a third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.aside = (nn.Linear(4, 4) for _ in range(3))
        self.adapters = nn.ModuleList(
            nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4)) for name in ("en", "de")})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, adapters in zip((self.first, self.second), self.adapters):
            x = torch.relu(adapters["de"](layer(x)))
        return x


def test_an_alternative_that_no_stage_uses_is_where_the_used_one_is() -> None:
    graph = graph_of(OneOfTwo(), torch.ones(2, 4))
    first, second = cut(graph, network_partitions(graph), [2])
    for stage, number in ((first, 0), (second, 1)):
        names = [f"adapters.{number}.en.0.{kind}" for kind in ("weight", "bias")]
        assert [*stage.beside] == names


def test_numbers_that_follow_from_sizes_do_not_cross() -> None:
    found = captured(Scaled(), torch.randn(5, 4))
    graph, network = found.graph, found.graph.network
    chain = make_stages(cut(graph, network_partitions(graph), [1]), network, CPU)
    numbers = graph.values_of_numbers(graph.sizes(found.leaves))
    values = chain[0](found.leaves, numbers)
    # the hidden state, and the constant, which no rank but the driver has
    assert sorted(tuple(value.shape) for value in values) == [(4,), (5, 4)]
    assert torch.equal(chain[1](values, numbers)[0], found.returned[0])


def test_a_stage_takes_no_weights_of_a_tensor_that_only_passes_through_it() -> None:
    graph = graph_of(SkipsOneLayer(), torch.ones(3, 4))
    codes = cut(graph, network_partitions(graph), [1, 2])
    assert [set(code.tensors) for code in codes] == [
        {"one.weight", "one.bias"},
        {"two.weight", "two.bias"},
        {"three.weight", "three.bias"},
    ]


class SkipsOneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.three(self.two(x)) + x


def test_parameter_read_directly_belongs_to_the_stage_that_reads_it() -> None:
    first, second = staged_pair(FirstScaled(), torch.ones(3, 4))
    assert tuple(dict(first.named_parameters())) == ("one.weight", "one.bias", "scale")
    assert tuple(dict(second.named_parameters())) == ("two.weight", "two.bias")
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
    graph = graph_of(Scaled(), torch.ones(3, 4))
    with pytest.raises(NetworkError, match="must rise and lie in"):
        cut(graph, network_partitions(graph), boundaries)


def test_moving_a_stage_moves_what_it_uses_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = Scaled()
    second = staged_pair(network, torch.ones(3, 4))[1]
    parameter, before = network.two.weight, deepcopy(network)
    monkeypatch.setattr(Tensor, "to", lambda value, device: value * 2)  # there is one device here
    second.move("other")
    assert network.two.weight is parameter
    for name in ("two.weight", "shift"):
        moved, old = (attrgetter(name)(net).detach() for net in (network, before))
        assert torch.equal(moved, old * 2)
    assert torch.equal(network.one.weight, before.one.weight)


class Recurrent(nn.Module):
    """Layers that capture exchanges for its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(4, 4, 2, dropout=0.5)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.first(x.view(-1, 2, 4))
        return cast("Tensor", self.last(self.norm(states[-1])))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile looks there
@pytest.mark.parametrize(
    "made", [FunctionalDropout, pytest.param(Recurrent, marks=pytest.mark.conformance)]
)
def test_a_compiled_stage_keeps_its_numbers(
    made: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, x = made(), torch.randn(6, 4)
    found = captured(network, x)
    reference = deepcopy(network)
    chain = make_stages(cut(found.graph, network_partitions(found.graph), [1]), network, CPU)
    light = partial(torch.compile, backend="aot_eager")  # Inductor needs half a minute of g++
    monkeypatch.setattr(torch, "compile", lambda code, **_: light(code))
    expected = outputs_and_gradients(reference, reference, x)
    for stage in chain:
        stage.compile_code()
    assert same(outputs_and_gradients(network, lambda y: run(found.graph, chain, [y]), x), expected)


META = torch.device("meta")


def test_a_network_that_is_given_lengths_on_the_cpu_first_is_on_its_device() -> None:
    graph = torch.fx.Graph()
    for name, value in (("lengths", torch.ones(2)), ("x", torch.empty(2, device=META))):
        graph.placeholder(name).meta["example_value"] = value
    captured: Any = SimpleNamespace(place=dict.fromkeys(graph.nodes, 0))
    assert NetworkGraph.device.fget(captured) == META  # type: ignore[attr-defined]


def test_constants_of_a_stage_go_to_its_device_or_stay_on_the_cpu() -> None:
    graph = torch.fx.Graph()
    graph.output([graph.get_attr(name) for name in ("moves", "stays")])
    values = {"moves": torch.arange(3), "stays": torch.arange(3)}
    code = GraphCode.of(graph, values, CPU)
    assert [value.device for value in code.function(META)()] == [META, META]
    meta = values | {"moves": torch.empty(3, device=META)}
    with pytest.MonkeyPatch.context() as patch:  # this device has no numbers to travel
        patch.setattr(torch.Tensor, "cpu", lambda value: torch.zeros(value.shape))
        code = GraphCode.of(graph, meta, META)
    assert [value.device for value in code.function(META)()] == [META, CPU]


def test_each_stage_of_a_rank_is_compiled_for_each_of_its_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilations: list[fx.GraphModule] = []

    def compiled(code: Any, **options: Any) -> Any:
        def backend(module: fx.GraphModule, _: Any) -> Any:
            compilations.append(module)
            return module.forward

        return torch_compile(code, **(options | {"options": None, "backend": backend}))

    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    graph = graph_of(net, torch.randn(4, 4))
    parts = network_partitions(graph)
    stages = make_stages(cut(graph, parts, range(1, len(parts))), net, CPU)
    torch_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compiled)
    for stage in stages:
        stage.compile_code()
    for size in (2, 3, 2, 3):
        values = [torch.randn(size, 4)]
        for stage in stages:
            values = stage(values)
    assert len(compilations) == 2 * len(stages) == 20
