"""The slow tier: networks that people use, cut in two and three, compute what they computed."""

from typing import Any

import pytest
import torch
from capturing import captured

from benchmarks.networks import NETWORKS, InTwo, compare, examine
from lightning_hybrid.capture import NotCaptured
from lightning_hybrid.graph import cut, network_partitions
from lightning_hybrid.stage import check

pytestmark = [
    # what the libraries say of themselves
    pytest.mark.filterwarnings("ignore"),
    # five captures of SwinUNETR beside other work
    pytest.mark.timeout(2400),
]
CASES = {name: case for cases in NETWORKS.values() for name, case in cases.items()}
ROUTED = "mixture of experts, tokens routed by value"
SMALL = "sparse gradients"  # five layers, and its two cuts both divide them badly
SEVERAL_GRAPHS = ("SwinUNETR", "SwinUNETR, checkpointing", ROUTED)


def test_networks_whose_python_branches_on_values_are_not_captured() -> None:
    with pytest.raises(NotCaptured, match=r"if len\(rows\)"):
        examine(CASES[ROUTED])


@pytest.mark.conformance
@pytest.mark.parametrize("name", [name for name in CASES if name != ROUTED])
def test_two_stages_compute_outputs_and_gradients_of_the_network(name: str) -> None:
    row = examine(CASES[name])
    assert row.split is (name != SMALL), row
    assert row.equal, row


@pytest.mark.conformance
@pytest.mark.parametrize("name", [name for name in CASES if name not in SEVERAL_GRAPHS])
def test_three_stages_have_the_outputs_of_the_network(name: str) -> None:
    torch.manual_seed(0)
    network = CASES[name].make()
    args, kwargs = CASES[name].arguments(3)
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


@pytest.mark.conformance
def test_the_table_would_show_wrong_gradients() -> None:
    network, arguments = CASES["UNet"].make(), CASES["UNet"].arguments(2)
    assert compare(network, InTwo(network, whole=True), arguments) == ""
    assert "gradients DIFFERS" in compare(network, Doubled(network, whole=True), arguments)
