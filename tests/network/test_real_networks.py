"""The slow tier: networks that people use, cut in two and three, compute what they computed."""

from typing import Any

import pytest
import torch
from capturing import captured

from benchmarks.networks import NETWORKS, Case, InTwo, compare, examine
from lightning_hybrid.network import check, cut, network_partitions

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
    args, kwargs = case.arguments(3)
    for training in (True, False):
        found = captured(network.train(training), *args, **kwargs)
        partitions = network_partitions(found.graph)
        codes = cut(found.graph, partitions, [len(partitions) * s // 3 for s in (1, 2)])
        assert all(code.tensors for code in codes)
        check(found.graph, codes, found.leaves)


class Doubled(InTwo):
    """Stages with the right outputs and twice the gradients of the first of them."""

    def backward(self, outputs: Any) -> None:
        super().backward([value + (value - value.detach()) for value in outputs])


def test_the_table_would_show_wrong_gradients() -> None:
    network, arguments = CASES["UNet"].make(), CASES["UNet"].arguments(2)
    assert compare(network, InTwo(network, whole=True), arguments) == ""
    assert "gradients DIFFERS" in compare(network, Doubled(network, whole=True), arguments)
