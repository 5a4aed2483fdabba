"""Fixtures: ranks that live as long as a test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crew import Crew
from driven import Model, Ranks, Replica, batches, let_go
from served import GRADIENTS, Service
from torch import nn

from lightning_hybrid.comm.protocol import Leaving, TakeGradients, TakeOptimizers
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.state.optimizers import ship


@pytest.fixture
def replicas() -> Iterator[Callable[..., Replica]]:
    """Makes replicas, whose workers are told to go if the test has not ended them."""
    made: list[Replica] = []

    def make(module: Model, devices: tuple[Any, ...], **options: Any) -> Replica:
        made.append(Replica(module, batches(1)[0], devices, **options))
        return made[-1]

    yield make
    for replica in made:
        let_go(replica)


@pytest.fixture
def ranks() -> Iterator[Callable[[Model, int], Ranks]]:
    """Makes drivers with a number of workers, likewise."""
    made: list[Ranks] = []

    def make(module: Model, workers: int) -> Ranks:
        made.append(Ranks(module, workers))
        return made[-1]

    yield make
    for one in made:
        let_go(one)


@pytest.fixture
def crew() -> Iterator[Crew]:
    """Two workers, for which the test answers."""
    made = Crew(2)
    yield made
    made.workers.close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    if made.is_alive:
        made.driver.send(Leaving(Failure("the test is over")))
        made.close()


@pytest.fixture
def trained(service: Service) -> Callable[[], torch.optim.Optimizer]:
    """Gives the worker an optimizer; returns a twin of it, which has the same gradients."""
    twin = nn.Linear(3, 2)
    twin.load_state_dict(service.module.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    shipped = ship([optimizer], dict(twin.named_parameters()), set())
    service.driver.send(TakeOptimizers((0,), *shipped))
    service.driver.send(TakeGradients(False, GRADIENTS.items()))
    for name, parameter in twin.named_parameters():
        parameter.grad = GRADIENTS[name].clone()
    return lambda: optimizer
