"""What scripts hear of ranks is what they would hear under DDP over the replicas."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_hybrid.comm import Coordinates
from lightning_hybrid.errors import PlanError
from lightning_hybrid.run.replica_world import (
    LauncherRanks,
    ReplicaWorld,
    ShownRanks,
    refuse_other_shards,
)

OTHERS = {
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "SLURM_PROCID": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
"""What a second driver hears from other launchers; data that are divided by these are whole."""
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


def worlds(
    replicas: int, stages: int, *, hosts: int = 1, order: tuple[int, ...] = (), cyclic: bool = False
) -> list[ReplicaWorld]:
    """As every process sees it."""
    per_host, found = replicas * stages // hosts, []
    for rank in range(replicas * stages):
        node, local = divmod(rank, per_host)
        if cyclic:
            local, node = divmod(rank, hosts)
        launched = LauncherRanks(rank, local, node)
        coordinates = Coordinates(rank, replicas, stages, order)
        found.append(ReplicaWorld.of(coordinates, launched, hosts, per_host))
    return found


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((1, 3), {}),
        ((2, 2), {}),
        ((2, 2), {"order": (3, 1, 0, 2)}),
        ((3, 1), {}),
        ((4, 2), {"hosts": 2}),
        ((2, 3), {"hosts": 2, "cyclic": True}),
        ((2, 3), {"hosts": 2, "order": (2, 1, 0, 5, 4, 3)}),
    ],
)
def test_drivers_hear_what_ranks_of_ddp_hear(shape: tuple[int, int], how: dict[str, Any]) -> None:
    replicas, hosts = shape[0], how.get("hosts", 1)
    everyone = worlds(*shape, **how)
    drivers = sorted((w for w in everyone if w.rank < replicas), key=lambda world: world.rank)
    assert [world.rank for world in drivers] == [*range(replicas)]
    for world in everyone:
        assert (world.size, world.hosts) == (replicas, hosts)
        assert len(world.drivers) * world.hosts == replicas
    here = replicas // hosts
    assert sorted(world.local_rank for world in drivers) == sorted([*range(here)] * hosts)


def test_whatever_is_for_one_rank_is_done_by_one() -> None:
    everyone = worlds(2, 3, hosts=2)
    assert sorted(world.rank for world in everyone) == [*range(6)]
    assert sum(world.local_rank == 0 for world in everyone) == 2  # once on each host


def test_a_replica_on_two_hosts_is_one_device() -> None:
    for world in worlds(1, 4, hosts=2):
        assert (world.size, world.hosts, len(world.drivers)) == (1, 1, 1)
    assert sum(world.local_rank == 0 for world in worlds(1, 4, hosts=2)) == 2


def test_hosts_with_drivers_are_numbered_first() -> None:
    """So `GROUP_RANK` of a driver is below `GROUP_WORLD_SIZE`, and one process prepares data."""
    for order, expected in (((), [0, 2, 1, 3]), ((3, 2, 0, 1), [1, 3, 2, 0])):
        everyone = worlds(2, 2, hosts=4, order=order)
        assert [world.node_rank for world in everyone] == expected
        for world in everyone:
            variables = world.variables
            assert variables["GROUP_RANK"] == variables["NODE_RANK"] == world.node_rank
            assert (world.rank < world.size) == (world.node_rank < variables["GROUP_WORLD_SIZE"])


def test_the_environment_speaks_of_replicas_until_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    shown = ShownRanks()
    shown.show(worlds(2, 2)[2].variables)
    asked = "import os; print(*(os.environ[n] for n in %r), 'SLURM_PROCID' in os.environ)"
    child = subprocess.run(
        [sys.executable, "-c", asked % [*TORCHRUN]], capture_output=True, text=True, check=True
    )
    assert child.stdout.split() == ["1", "2", "1", "2", "False"]
    os.environ["LOCAL_RANK"] = "9"  # somebody else's
    shown.restore()
    assert {n: os.environ[n] for n in TORCHRUN} == {**TORCHRUN, "LOCAL_RANK": "9"}


def test_variables_of_each_launcher_speak_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        monkeypatch.setenv(name, "4" if "SIZE" in name else "2")
    shown = ShownRanks()
    shown.show(worlds(2, 2)[2].variables)
    assert {name: os.environ[name] for name in OTHERS} == OTHERS
    shown.restore()


class Stream(IterableDataset[int]):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 16, self.world_size))


DATA = TensorDataset(torch.arange(16))


class OfDatasets(IterableDataset[int]):
    """As `split_dataset_by_node` of Hugging Face leaves it."""

    _distributed = SimpleNamespace(rank=2, world_size=4)

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, sampler=DistributedSampler(DATA, 4, 2)),
        DataLoader(Stream(2, 4)),
        DataLoader(OfDatasets()),
    ],
)
def test_a_loader_that_was_made_for_all_processes_is_refused(loader: Any) -> None:
    """A sampler or data set that was made before the run by the ranks of all processes."""
    with pytest.raises(PlanError, match="=4, the number of all processes; with 2 replicas"):
        refuse_other_shards(loader, 2, 4, worlds(2, 2)[2])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1)),
        DataLoader(Stream(1, 2)),
        DataLoader(Stream(3, 4)),  # neither of the two: the script has its reasons
        DataLoader(DATA, batch_size=4),
        [1, 2],
    ],
)
def test_other_loaders_are_the_script_s_own(loader: Any) -> None:
    refuse_other_shards(loader, 2, 4, worlds(2, 2)[2])
    refuse_other_shards(DataLoader(Stream(2, 4)), 2, 4, worlds(4, 1)[2])
