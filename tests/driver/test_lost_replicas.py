"""A step in which a replica is lost has the gradient of the samples of the others."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import together
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.mesh import Mesh, make_world
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.stage.gradient_averaging import AveragingGroup

WEIGHTS = [5.0, 3.0, 2.0, 4.0]
GRADIENTS = [torch.tensor([float(4**replica), 1.0], dtype=torch.float64) for replica in range(4)]


class Replica:
    """A driver without workers, whose gradients are given."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        world = make_world(store, rank, 4)
        here = Coordinates(rank, 4, 1)
        self.mesh = Mesh(here, store, world, "gloo", timedelta(seconds=30))
        self.mesh.survive(survives=True)
        assert self.mesh.survivors is not None
        self.survivors = self.mesh.survivors
        self.parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.group = AveragingGroup(
            [self.parameter, self.unused],
            tuple,
            self.mesh.data_parallel,
            survivors=self.survivors,
        )
        commands: Any = SimpleNamespace(
            remote=SimpleNamespace(flush=lambda: None),
            workers=SimpleNamespace(ranks=()),
            tell=lambda command: None,
            ask=lambda command: [],
        )
        borrowing: Any = SimpleNamespace(add_borrowed_gradients=lambda: None)
        replicated: Any = SimpleNamespace(networks=[], rest=self.group)
        self.gradients = ReplicaGradients(commands, borrowing, replicated, set(), self.survivors)

    def step(self) -> None:
        rank = self.mesh.coordinates.rank
        self.survivors.weight = WEIGHTS[rank]
        self.parameter.grad = WEIGHTS[rank] * GRADIENTS[rank]
        self.gradients.before_backward()
        self.gradients.after_backward()

    def begin_and_stop(self) -> None:
        """As one that is killed when it has sent a part."""
        self.parameter.grad = GRADIENTS[self.mesh.coordinates.rank].clone()
        self.gradients.before_backward()
        self.group.finish()


def mean(replicas: list[int]) -> torch.Tensor:
    total = sum(WEIGHTS[replica] for replica in replicas)
    return sum(WEIGHTS[r] * GRADIENTS[r] for r in replicas) / torch.tensor(total)


@pytest.mark.parametrize("begins", [True, False])
def test_those_that_are_left_average_what_they_have_kept(begins: bool) -> None:
    store = dist.HashStore()
    replicas = together(*(lambda rank=rank: Replica(rank, store) for rank in range(4)))
    together(*(replica.step for replica in replicas))
    for replica in replicas:
        torch.testing.assert_close(replica.parameter.grad, mean([0, 1, 2, 3]), rtol=0, atol=1e-12)
    if begins:
        replicas[2].begin_and_stop()
    left = [replicas[0], replicas[1], replicas[3]]
    replicas[0].survivors.lose([2])
    for _ in range(2):  # the step in which it is lost, and the next one
        together(*(replica.step for replica in left))
        for replica in left:
            found = replica.parameter.grad
            torch.testing.assert_close(found, mean([0, 1, 3]), rtol=0, atol=1e-12)
            assert replica.unused.grad is None
    assert [replica.mesh.world.size() for replica in left] == [3] * 3
    assert [replica.mesh.living_ranks() for replica in left] == [[0, 1, 3]] * 3
    for replica in replicas:
        replica.group.close()
        replica.mesh.shutdown()
