"""The slow tier: networks that people use, cut in two and three, compute what they computed."""

import pytest
import torch

from benchmarks.networks import NETWORKS, Case, examine
from lightning_hybrid.network import check, cut, describe, network_partitions, trace

pytestmark = [
    pytest.mark.conformance,
    # what the libraries say of themselves
    pytest.mark.filterwarnings("ignore"),
]
CASES = {name: case for cases in NETWORKS.values() for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_stages_compute_outputs_and_gradients_of_the_network(case: Case) -> None:
    row = examine(case)
    assert row.split, row
    assert row.equal, row


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
