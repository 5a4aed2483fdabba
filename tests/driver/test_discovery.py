"""Which networks are cut, which stay on the driver, which are refused."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.driver.discovery import Discovery
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.progress import StartProgress
from lightning_hybrid.errors import NetworkError, NetworkNotFoundError, PlanError
from lightning_hybrid.profiling import CalledNetwork
from lightning_hybrid.stage import StageOptions

X = torch.ones(4, 6)


class Watched:
    """The networks of a module, on the driver of a replica of three stages; nothing is cut."""

    def __init__(
        self, *, automatic: bool, training: bool = True, begins: bool = True, **networks: nn.Module
    ) -> None:
        self.lines: list[str] = []
        self.without_cut = 0
        self.module = nn.ModuleDict(networks)
        driver: Any = SimpleNamespace(
            device=torch.device("cpu"),
            note_no_cut=self.note_no_cut,
            keep=lambda module: None,
            have_here=lambda module, whole=False: None,
            remote=SimpleNamespace(suspended=nullcontext, names=set),
            calls=SimpleNamespace(one_stream=nullcontext, as_on_one_device=False),
        )
        mesh: Any = SimpleNamespace(coordinates=Coordinates(0, 1, 3), drivers=None)
        self.networks = Discovery(
            self.module,
            driver,
            mesh,
            DriverOptions(
                seed=0,
                stages=StageOptions(),
                microbatches=2,
                planner=self.plan,
                trains=training,
                automatic=automatic,
                say=self.lines.append,
                progress=StartProgress(None),
            ),
            {},
        )
        if begins:
            self.networks.begin()

    def note_no_cut(self) -> None:
        self.without_cut += 1

    def plan(self, network: CalledNetwork, *_: Any) -> Any:
        raise PlanError(f"asked for a plan of {network.name}")


def test_before_an_evaluation_begins_calls_cut_nothing() -> None:
    found = Watched(automatic=False, training=False, begins=False, net=large())
    with torch.no_grad():
        found.module["net"](torch.ones(4, 6))  # as a logger on rank 0 that draws the graph
        found.networks.begin()
        with pytest.raises(PlanError, match=r"asked for a plan of net"):
            found.module["net"](torch.ones(4, 6))
    found.networks.close()


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))


def test_what_cannot_be_cut_stays_on_the_driver_if_no_number_of_stages_was_asked_for() -> None:
    watched = Watched(automatic=True, net=nn.Linear(6, 3))
    assert watched.module["net"](X).shape == (4, 3)
    assert watched.module["net"](X).requires_grad
    [line] = watched.lines
    assert "'net' (Linear) has 1 network partition, fewer than 3 stages" in line
    assert "as under ddp" in line
    watched.networks.require()
    assert watched.without_cut == 1


def test_a_module_without_parameters_is_refused_where_it_is_to_be_trained() -> None:
    with pytest.raises(NetworkNotFoundError, match="ModuleDict owns no module with parameters"):
        Watched(automatic=False, net=nn.Tanh())
    watched = Watched(automatic=False, training=False, net=nn.Tanh())
    assert torch.equal(watched.module["net"](X), X.tanh())
    watched.networks.require()


def test_what_cannot_be_cut_is_refused_if_a_number_of_stages_was_asked_for() -> None:
    watched = Watched(automatic=False, net=nn.Linear(6, 3))
    with pytest.raises(PlanError, match=r"1 network partition, fewer .*=3\. Use at most 1 stage,"):
        watched.module["net"](X)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_small_network_before_a_large_one_stays_on_the_driver(automatic: bool) -> None:
    watched = Watched(automatic=automatic, stem=nn.Linear(6, 6), net=large())
    hidden = watched.module["stem"](X)
    [line] = watched.lines
    assert line.endswith("it stays on the driver.")
    with pytest.raises(PlanError, match="asked for a plan of net"):
        watched.module["net"](hidden)


def lend(watched: Watched) -> Tensor:
    net = watched.module["net"]
    made = {name: p.detach() * 2 for name, p in net.named_parameters()}
    output: Tensor = torch.func.functional_call(net, made, (X,))
    return output


def test_a_call_before_training_leaves_the_modules_inside_watched() -> None:
    part = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)])
    run = Watched(automatic=False, net=nn.Sequential(part, nn.Linear(6, 6)))
    for _ in range(2):
        with torch.no_grad():
            run.module["net"](X)
    with pytest.raises(PlanError, match=r"asked for a plan of net\.0$"):  # which training calls
        part(X)


def test_a_call_on_other_weights_computes_with_these_and_is_not_taken_for_the_networks() -> None:
    network = large()
    made = {name: p.detach() * 2 for name, p in network.named_parameters()}
    expected = torch.func.functional_call(network, made, (X,))
    watched = Watched(automatic=True, net=network)
    assert torch.equal(lend(watched), expected)
    with pytest.raises(PlanError, match="asked for a plan of net"):
        watched.module["net"](X)


def test_a_network_that_is_only_called_on_other_weights_stays_on_the_driver_or_is_refused() -> None:
    watched = Watched(automatic=True, net=large())
    lend(watched)
    watched.networks.require()
    [line] = watched.lines
    assert "'net' (Sequential) is called by torch.func.functional_call" in line
    watched = Watched(automatic=False, net=large())
    lend(watched)
    with pytest.raises(
        NetworkNotFoundError, match=r"'net' is called by torch.func.functional_call"
    ):
        watched.networks.require()


class Doubles(TorchFunctionMode):
    """Every linear layer gives the double."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


@pytest.mark.parametrize("mode", [Doubles, lambda: FlopCounterMode(display=False)])
def test_a_call_inside_of_a_mode_runs_in_it_and_is_not_taken_for_the_networks(mode: Any) -> None:
    network = large()
    with mode():
        expected = network(X)
    watched = Watched(automatic=False, net=network)
    with mode():
        assert torch.equal(watched.module["net"](X), expected)
    with pytest.raises(NetworkNotFoundError, match=r"'net' is called inside of a mode that sees"):
        watched.networks.require()
    with torch.device("cpu"), pytest.raises(PlanError, match="asked for a plan of net"):
        watched.module["net"](X)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        x = self.two(x) if x.sum() > 0 else -self.two(x)
        return self.three(x)


def test_a_chain_of_graphs_is_announced_with_the_line_that_makes_it_one() -> None:
    network = Branches()
    expected = network(X)
    watched = Watched(automatic=True, net=network)
    assert torch.equal(watched.module["net"](X), expected)
    [line] = watched.lines
    assert line.startswith("Network 'net' (Branches) becomes several graphs")
    assert "self.two(x) if x.sum() > 0" in line


class SkipsLayers(nn.Module):
    """Layers that are left out at random, by Python's or torch's generator."""

    def __init__(self, keeps: Callable[[], Any]) -> None:
        super().__init__()
        self.layers, self.keeps = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), keeps

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.keeps():
                x = layer(x)
        return x


def keeps_by_python() -> bool:
    return random.random() < 0.9


def keeps_by_torch() -> Tensor:
    return torch.rand(()) < 0.9


def refusal(network: nn.Module, call: Callable[[nn.Module], Any]) -> str:
    """The first line of what is said of a network that cannot be cut."""
    watched = Watched(automatic=False, net=network)
    call(watched.module["net"])
    with pytest.raises(NetworkNotFoundError) as error:
        watched.networks.require()
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(
    ("keeps", "causes"),
    [
        # (torch 2.15 follows Python's generator, up to the branch)
        (
            keeps_by_python,
            ("TorchDynamo does not follow 'Random.random'", "Data-dependent branching"),
        ),
        (keeps_by_torch, ("Data-dependent branching",)),
    ],
)
@pytest.mark.filterwarnings("ignore:Dynamo does not know")  # (as an error it would be the cause)
def test_layers_left_out_at_random_are_named_first_with_their_line(
    keeps: Any, causes: tuple[str, ...]
) -> None:
    line = refusal(SkipsLayers(keeps), lambda net: net(X.clone().requires_grad_()))
    refused = "'net' cannot be captured as one graph:"
    assert line.startswith(tuple(f"{refused} {cause} ({__file__}:" for cause in causes))


@pytest.mark.filterwarnings("ignore")  # (torch.ao is on its way out)
def test_a_network_that_is_prepared_for_quantisation_is_refused_for_its_observers() -> None:
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6))
    network.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore
    line = refusal(torch.ao.quantization.prepare_qat(network.train()), lambda net: net(X))
    assert line.startswith("'net' cannot be captured as one graph: TorchDynamo does not follow 'F")
    assert f"FakeQuantize.forward' (called in {__file__}:" in line


def test_a_network_that_is_called_without_gradients_only_is_refused_with_the_line() -> None:
    def call(net: nn.Module) -> None:
        with torch.no_grad():
            net(X)

    said = f"'net' was called without gradients only ({__file__}:"
    assert refusal(large(), call).startswith(said)


def test_a_large_network_that_is_never_called_is_missed() -> None:
    watched = Watched(automatic=False, stem=nn.Linear(6, 6), net=large())
    watched.module["stem"](X)
    with pytest.raises(NetworkNotFoundError, match="that can be cut"):
        watched.networks.require()


@pytest.mark.parametrize("automatic", [True, False])
def test_parts_that_are_called_in_place_of_a_module_are_told_of(automatic: bool) -> None:
    watched = Watched(automatic=automatic, net=large())
    with nullcontext() if automatic else pytest.raises(PlanError) as error:
        watched.module["net"][1:](watched.module["net"][:1](X))
    told = (
        [line for line in watched.lines if "by itself" in line] if automatic else [str(error.value)]
    )
    assert len(told) == 1
    assert "To have them cut as one network, call self.net(...)" in told[0]


def test_parts_without_a_call_of_all_are_told_of_once() -> None:
    watched = Watched(automatic=False, parts=nn.ModuleList([*large()]), other=large())
    x = X
    for part in watched.module["parts"]:
        x = part(x)
    [line] = [line for line in watched.lines if "by itself" in line]
    assert "call a module that calls all of them" in line
    with pytest.raises(NetworkNotFoundError, match="call a module that calls all of them"):
        watched.networks.require()


def test_what_a_module_without_one_graph_calls_itself_is_not_told_of() -> None:
    class Prints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = large(), large()

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.one(x)
            print(float(h.sum()))
            return self.two(h)  # type: ignore[no-any-return]

    watched = Watched(automatic=True, net=Prints())
    with pytest.raises(PlanError, match="asked for a plan"):
        watched.module["net"](X)
    assert not [line for line in watched.lines if "by itself" in line]


def test_a_refusal_of_a_part_says_why_the_whole_was_not_captured() -> None:
    class Marks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(large() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(self.run, block, x, use_reentrant=False)
            return x

        def run(self, block: nn.Module, x: Tensor) -> Tensor:
            bias = torch.zeros_like(x)
            bias.requires_grad = True
            return block(x + bias)

    watched = Watched(automatic=False, net=Marks())
    with pytest.raises(NetworkError) as caught:
        watched.module["net"](X.clone().requires_grad_())
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("Network 'net' (Marks) cannot be captured as one graph: setattr()")
    assert "`bias.requires_grad = True`" in first
    assert second == "So the modules that it calls are looked at one by one, and that fails:"
    assert third.startswith("Network 'net.blocks.0' (Sequential) is called inside of activation")
