import pytest
import torch
from torch import nn

from lightning_hybrid.asking.partition_costs import capture_call, counted_parts, measured_parts
from lightning_hybrid.errors import PlanError
from lightning_hybrid.graph import network_partitions
from lightning_hybrid.planning.partition_table import TiedWeight


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 8))


def test_a_network_without_memory_is_captured_and_counted() -> None:
    with torch.device("meta"):
        graph, leaves = capture_call(network(), (torch.empty(6, 16),), {})
    parts = counted_parts(graph, network_partitions(graph), 1e9, {})(6)
    assert leaves[0].is_meta
    assert parts.parameters == [16 * 32 + 32 + 64, 32 * 8 + 8]
    # two operations for each multiplication and addition, and one for each element of the rest
    matrix, light = 2 * 6 * 16 * 32, 6 * 32
    assert matrix <= parts.forward_s[0] * 1e9 <= matrix + 4 * light
    assert (parts.cut_bytes[0], parts.output_bytes) == (6 * 32 * 4, 6 * 8 * 4)
    assert parts.gradient_bytes == [4 * size for size in parts.parameters]


def test_weights_that_several_partitions_use_are_known_with_their_sizes() -> None:
    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    tied[2].weight = tied[0].weight
    for trained in (True, False):  # frozen ones are sent too
        tied.requires_grad_(trained)
        graph, _ = capture_call(tied, (torch.empty(6, 16),), {})
        found = counted_parts(graph, network_partitions(graph), 1e9, {})(6).tied
        copy = 4 * 256 * (1 + trained)  # with its gradient
        assert found == [TiedWeight(4 * 256, (0, 2), elements=256, copy_bytes=copy)]


def test_counted_costs_are_proportional_to_the_micro_batch() -> None:
    with torch.device("meta"):
        graph, _ = capture_call(network(), (torch.empty(6, 16),), {})
    costs_of = counted_parts(graph, network_partitions(graph), 1e9, {"0.weight": 100})
    whole, third = costs_of(6), costs_of(2)
    assert third.forward_s == pytest.approx([f / 3 for f in whole.forward_s])
    assert third.cut_bytes[0] == whole.cut_bytes[0] // 3
    assert third.kept_bytes == whole.kept_bytes == [100 + 2 * 4 * 608, 2 * 4 * 264]


def test_states_that_replicas_divide_are_counted_apart() -> None:
    with torch.device("meta"):
        graph, _ = capture_call(network(), (torch.empty(6, 16),), {})
    state = {"0.weight": 100}
    given = graph, network_partitions(graph), 1e9, state
    assert counted_parts(*given)(6).divided(2).kept_bytes[0] == 100 + 2 * 4 * 608
    divided = counted_parts(*given, divides_states=True)(6).divided(2)
    assert divided.kept_bytes == [50 + 2 * 4 * 608, 2 * 4 * 264]


def test_capturing_runs_nothing() -> None:
    module = network()
    capture_call(module, (torch.randn(6, 16),), {})
    assert module.get_buffer("2.num_batches_tracked") == 0


def test_measuring_changes_no_weight(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID_CACHE", str(tmp_path))
    module = network()
    before = [p.clone() for p in module.parameters()]
    graph, leaves = capture_call(module, (torch.randn(6, 16),), {})
    costs_of = measured_parts(graph, network_partitions(graph), leaves, torch.device("cpu"), {})
    parts = costs_of(3)
    assert all(seconds > 0 for seconds in (*parts.forward_s, *parts.backward_s, *parts.step_s))
    assert all(map(torch.equal, before, module.parameters()))
    assert parts.cut_bytes[0] == 3 * 32 * 4


def test_a_network_that_cannot_be_captured_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y if float(y.detach().numpy().sum()) > 0 else -y

    with pytest.raises(PlanError, match="Odd cannot be captured as one graph"):
        capture_call(Odd(), (torch.randn(2, 4),), {})
