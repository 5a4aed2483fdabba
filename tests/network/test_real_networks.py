"""The slow tier: networks that people use, cut in two and three, compute what they computed."""

import pytest
import torch
from torch import Tensor

from benchmarks.networks import NETWORKS, Case, compare, divide, examine
from lightning_hybrid.network import Stage, check, cut, describe, network_partitions, trace

# what the libraries say of themselves
pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {name: case for cases in NETWORKS.values() for name, case in cases.items()}


@pytest.mark.conformance
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_stages_compute_outputs_and_gradients_of_the_network(case: Case) -> None:
    row = examine(case)
    assert row.split, row
    assert row.equal, row


@pytest.mark.conformance
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_three_stages_have_the_outputs_of_the_network(case: Case) -> None:
    torch.manual_seed(0)
    network = case.make()
    for training in (True, False):
        network.train(training)
        graph = trace(network, *describe(*case.arguments(2)))
        partitions = network_partitions(graph)
        parts = cut(graph, partitions, [len(partitions) * stage // 3 for stage in (1, 2)])
        assert all(next(part.parameters(), None) is not None for part in parts)
        check(graph, parts, *case.arguments(3))


class Doubled(torch.nn.Module):
    """A stage with the right outputs and twice the gradients."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, values: list[Tensor]) -> list[Tensor]:
        return [value + (value - value.detach()) for value in self.stage(values)]


def test_the_table_would_show_wrong_gradients() -> None:
    case = CASES["UNet"]
    graph = trace(case.make(), *describe(*case.arguments(2)))
    (first, second), shares = divide(graph)
    assert shares is not None
    assert compare(graph, [first, second], case.arguments(2)) == ""
    assert "gradients DIFFERS" in compare(graph, [first, Doubled(second)], case.arguments(2))
