"""When gradients are averaged over the replicas, and by whom."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from crew import Crew

from lightning_hybrid.comm.protocol import FreeCall, Reduce
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.when_to_average import ReplicaGradients


class Notes:
    """A data-parallel group that notes when it averages."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    def __getattr__(self, method: str) -> Any:
        return lambda: self._notes.append(f"{self._name} {method}")


class Step:
    """A training step of a driver with a number of workers and two networks."""

    def __init__(self, workers: int, *, borrows: bool = False) -> None:
        self.notes: list[str] = []
        self.crew = Crew(workers)
        self.remote = SimpleNamespace(
            in_graph=False,
            flush=lambda: self.notes.append("flush"),
            outdate=lambda *_: None,
        )
        remote: Any = self.remote
        replicated: Any = SimpleNamespace(
            networks=[Notes("first", self.notes), Notes("second", self.notes)],
            rest=Notes("rest", self.notes),
        )

        class Borrows:
            def __bool__(self) -> bool:
                return borrows

            def add_borrowed_gradients(_) -> None:
                self.notes.append("borrowed")

        borrowing: Any = Borrows()
        commands = Commands(self.crew.workers, remote)
        self.gradients = ReplicaGradients(commands, borrowing, replicated, set())


@pytest.fixture
def step() -> Iterator[Any]:
    made: list[Step] = []

    def make(workers: int, *, borrows: bool = False) -> Step:
        made.append(Step(workers, borrows=borrows))
        return made[-1]

    yield make
    for one in made:
        one.crew.workers.close()


def test_the_backward_of_the_only_call_may_average(step: Any) -> None:
    one = step(1)
    assert not one.gradients.overlap(0)
    assert one.gradients.overlap(1)
    assert not one.gradients.overlap(2)  # which backward is the last, nobody knows


def test_a_penalty_tied_weights_and_accumulation_forbid_it(step: Any) -> None:
    one, tied = step(1), step(1, borrows=True)
    assert not tied.gradients.overlap(1)
    one.remote.in_graph = True
    assert not one.gradients.overlap(1)
    one.remote.in_graph = False
    one.gradients.synchronize = False
    assert not one.gradients.overlap(1)


def test_networks_that_no_backward_has_averaged_are_averaged_in_order(step: Any) -> None:
    one = step(1)
    one.gradients.unaveraged.add(1)
    one.gradients.unaveraged.add(0)
    one.gradients.before_backward()
    one.gradients.after_backward()
    assert one.notes == [
        "flush",
        "borrowed",
        "flush",
        "first reduce",
        "flush",
        "second reduce",
        "rest arm",
        "rest finish",
    ]
    assert [one.crew.heard(1) for _ in range(2)] == [Reduce(0), Reduce(1)]
    one.gradients.after_backward()  # they are final now
    one.crew.workers.send(1, FreeCall(0, 0))
    assert one.crew.heard(1) == FreeCall(0, 0)


def test_what_a_backward_has_averaged_is_not_averaged_again(step: Any) -> None:
    one = step(1)
    one.gradients.after_backward()
    assert one.notes == ["flush", "borrowed", "rest arm", "rest finish"]


def test_while_gradients_accumulate_they_come_to_the_owners_and_stay(step: Any) -> None:
    one = step(1)
    one.gradients.synchronize = False
    one.gradients.unaveraged.add(0)
    one.gradients.before_backward()
    one.gradients.after_backward()
    assert one.notes == ["flush", "borrowed"]
    one.gradients.synchronize = True
    one.gradients.after_backward()
    assert "first reduce" in one.notes


def test_without_workers_averaging_overlaps_the_backward(step: Any) -> None:
    one = step(0)
    one.gradients.before_backward()
    one.gradients.after_backward()
    assert one.notes == ["rest arm", "flush", "borrowed", "rest finish"]
