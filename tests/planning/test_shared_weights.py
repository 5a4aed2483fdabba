"""A weight that is used several times counts once on each rank that has it."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from capturing import graph_of
from torch import Tensor, nn

from lightning_hybrid.graph import NetworkPartition, network_partitions
from lightning_hybrid.planning.balanced import balanced_ends
from lightning_hybrid.planning.memory_check import ChainSizes, MemoryFit
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem
from lightning_hybrid.profiling.network_table import count, states_of_partitions


class Often(nn.Module):
    """One block, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(6):
            x = torch.tanh(self.block(x))
        return self.last(x)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, tuple[NetworkPartition, ...], PartitionTable]:
    """With its partitions, and their table with the state of Adam, without activations."""
    graph = graph_of(Often(), torch.ones(4, 4))
    partitions = network_partitions(graph)
    state = {name: 2 * p.nbytes for name, p in graph.network.named_parameters()}
    table = count(graph, partitions).with_optimizer(states_of_partitions(partitions, state))
    nothing = [0] * len(partitions)
    table = replace(table, memory_bytes=table.kept_bytes, activation_bytes=nothing)
    return graph.network, partitions, table


def problem(table: PartitionTable, *limits: float) -> StepProblem:
    return StepProblem(
        table=table,
        speeds=[1.0] * 3,
        links=LinkCosts.equal(3, 1e9),
        microbatches=2,
        memory_limits=limits,
    )


def test_the_table_has_each_weight_once(network) -> None:  # type: ignore[no-untyped-def]
    whole, _, table = network
    sizes = [p.numel() for p in whole.parameters()]
    assert sum(table.parameters) == sum(sizes)
    assert sum(table.gradient_bytes) == 4 * sum(sizes)
    assert sum(table.kept_bytes) == 16 * sum(sizes)


@pytest.mark.parametrize("devices", [[1, 2, 0], [1, 0, 1, 0]])
def test_a_rank_has_it_once_and_its_owner_alone_the_state(network, devices) -> None:  # type: ignore[no-untyped-def]
    whole, partitions, table = network
    sizes = {name: p.numel() for name, p in whole.named_parameters()}
    n = len(partitions)
    for cuts in combinations(range(1, n), len(devices) - 1):
        ends = [*cuts, n]
        owned, held = dict[str, int](), {device: set[str]() for device in devices}
        found = problem(table).held(ends, devices)
        rows = table.rows(ends, problem(table).costs(ends, devices))
        for row, (a, b), device in zip(rows, pairwise((0, *ends)), devices):
            used = {name for partition in partitions[a:b] for name in partition.parameters}
            assert row.parameters == sum(sizes[name] for name in used - held[device])
            held[device] |= used
            for name in used:
                owned.setdefault(name, device)
        for device, names in held.items():
            mine = {name for name in names if owned[name] == device}
            assert found[device] == sum(4 * sizes[n] * (4 if n in mine else 2) for n in names)
            ranks = [row.memory_bytes for row in rows if row.device == device]
            assert found[device] == sum(ranks)


def test_all_that_cut_by_memory_see_the_copies(network) -> None:  # type: ignore[no-untyped-def]
    """The least room with which three devices can hold it, which all cuts show."""
    _, partitions, table = network
    n, order = len(partitions), [1, 2, 0]
    fullest = [max(problem(table).held([*cuts, n], order)) for cuts in combinations(range(1, n), 2)]
    way = ChainSizes(stages=3, microbatches=1)
    assert max(MemoryFit.of(table, way, [0.0] * 3, 4).lacks) == pytest.approx(min(fullest))
    for room in (min(fullest) - 8, min(fullest)):
        fits = MemoryFit.of(table, way, [room] * 3, 4).fits
        found = balanced_ends(problem(table, *[room] * 3), order)
        assert (found is not None) is fits is (room >= min(fullest))
        assert found is None or problem(table, *[room] * 3).fits(found, order)
