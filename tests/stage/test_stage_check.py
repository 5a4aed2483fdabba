import dataclasses
import sys
from collections.abc import Callable

import pytest
import torch
from captured_networks import FunctionalDropout, ResNet
from capturing import captured
from torch import Tensor, nn

from lightning_hybrid.errors import StitchError
from lightning_hybrid.graph import StageCode, cut, network_partitions, why_whole
from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.profiling.measure import PeakMemory
from lightning_hybrid.stage import check
from lightning_hybrid.stage.stage_check import _difference


def two_stages(graph: NetworkGraph) -> list[StageCode]:
    return cut(graph, network_partitions(graph), [1])


def test_check_accepts_stages_and_leaves_no_trace() -> None:
    network, x = ResNet(blocks=(1, 1)), torch.randn(2, 1, 16, 16, 16)
    found = captured(network, x)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    generator = torch.get_rng_state()
    check(found.graph, two_stages(found.graph), found.leaves)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)


def test_check_compares_random_layers_on_the_same_numbers() -> None:
    found = captured(FunctionalDropout(), torch.randn(9, 4))
    check(found.graph, two_stages(found.graph), found.leaves)


def test_check_treats_nan_as_equal() -> None:
    found = captured(FunctionalDropout().eval(), torch.full((2, 4), torch.nan))
    check(found.graph, two_stages(found.graph), found.leaves)


def test_check_names_the_output_that_differs() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    found = captured(network, torch.randn(2, 4))
    first, second = two_stages(found.graph)
    swapped = {"2.weight": "0.weight"}
    names = tuple(swapped.get(name, name) for name in second.tensors)
    wrong = dataclasses.replace(second, tensors=names)
    (output,) = found.graph.tensor_outputs
    with pytest.raises(StitchError, match=f"output '{output.name}' differs by up to"):
        check(found.graph, [first, wrong], found.leaves)


class Pooled(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x - x.mean(0)


def test_network_that_mixes_samples_is_not_split() -> None:
    found = captured(Pooled(), torch.randn(4, 4))
    assert "samples meet in 'mean'" in str(why_whole(found.graph, found.leaves, 2))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_does_not_keep_a_network_from_being_split(training: bool) -> None:
    network = ResNet(blocks=(1, 1)).train(training)
    found = captured(network, torch.randn(6, 1, 16, 16, 16))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    assert why_whole(found.graph, found.leaves, 3) is None
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


def sliced(x: Tensor) -> Tensor:
    return x[:, 1:3]


def expanded(x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, 2)


def overlapping(x: Tensor) -> Tensor:
    return x.unfold(1, 2, 1)[:, 1]


@pytest.mark.parametrize("part", [sliced, expanded, overlapping])
def test_a_part_of_a_tensor_may_cross_a_cut(part: Callable[[Tensor], Tensor]) -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            some = part(self.first(x))
            return self.second(some) + some.sum(1, keepdim=True)

    found = captured(Crossed(), torch.randn(3, 4))
    check(found.graph, two_stages(found.graph), found.leaves)


def test_a_buffer_that_is_counted_up_and_returned_is_what_it_was_then() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return self.second(self.first(x)), self.calls

    network = Counts()
    found = captured(network, torch.randn(3, 4))
    before = network.calls.clone()
    check(found.graph, two_stages(found.graph), found.leaves)
    assert network.calls == before


def test_on_a_gpu_results_may_differ_by_rounding_and_by_nothing_else() -> None:
    one = torch.tensor([1.0, torch.nan, -100.0])
    assert _difference(one, one * (1 + 1e-4), exact=False) is None
    assert _difference(one, one * (1 + 1e-4), exact=True) is not None
    for other in (one + 2, one.nan_to_num(), one.double(), one[:2]):
        assert _difference(one, other, exact=False) is not None
    assert _difference(torch.tensor([3]), torch.tensor([4]), exact=False) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_check_keeps_no_activations() -> None:
    half = [nn.Linear(1, 1), *(nn.Tanh() for _ in range(20))]
    network = nn.Sequential(*half, *half)
    found = captured(network, torch.randn(2**20, 1))  # 4 MiB, 42 times
    peak = PeakMemory(torch.device("cpu"))
    check(found.graph, two_stages(found.graph), found.leaves)
    assert peak.taken() < 80 * 2**20


class LooksAtItsSlope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        slope = torch.func.grad(lambda y: torch.tanh(y).sum())(x)
        return self.last(x * slope)  # type: ignore[no-any-return]


def test_a_network_that_goes_back_through_a_part_of_itself_is_checked() -> None:
    found = captured(LooksAtItsSlope(), torch.randn(3, 4))
    check(found.graph, cut(found.graph, network_partitions(found.graph), []), found.leaves)
