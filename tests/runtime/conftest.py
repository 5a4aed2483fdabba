"""Ranks that live as long as a test."""

from collections.abc import Callable, Iterator

import pytest
from crew import Crew
from driven import Model, Ranks, Replica, batches, let_go


@pytest.fixture
def replicas() -> Iterator[Callable[[Model, tuple[int, ...]], Replica]]:
    """Makes replicas, whose workers are told to go if the test has not ended them."""
    made: list[Replica] = []

    def make(module: Model, devices: tuple[int, ...]) -> Replica:
        made.append(Replica(module, batches(1)[0], devices))
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
