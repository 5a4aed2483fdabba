"""All replicas take the averages of a step or none does, and a launcher says who is lost."""

import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import together

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.survivors import FAULT, Survivors


def replicas(count: int, stages: int = 1) -> tuple[dist.Store, list[Survivors]]:
    """The drivers' side, without groups."""
    store = dist.HashStore()
    made = [
        Survivors(
            Coordinates(replica * stages, count, stages),
            store,
            None,
            "run",
            timedelta(seconds=20),
            lambda living: None,
        )
        for replica in range(count)
    ]
    return store, made


def agreed(drivers: Sequence[Survivors], complete: Sequence[bool]) -> list[tuple[int, ...] | None]:
    return together(
        *(
            lambda driver=driver, has_all=has_all: driver.agree(complete=has_all)
            for driver, has_all in zip(drivers, complete)
        )
    )


def test_averages_hold_where_all_have_them_in_one_step_after_the_other() -> None:
    _, drivers = replicas(3)
    for _ in range(3):
        assert agreed(drivers, [True] * 3) == [None] * 3


def test_nobody_takes_averages_that_another_one_lacks() -> None:
    _, drivers = replicas(3)
    assert agreed(drivers, [True] * 3) == [None] * 3
    assert drivers[0].lose([1]) == {1}
    left = drivers[0], drivers[2]
    # replica 0 has all its sums, and replica 2 has not
    assert agreed(left, [True, False]) == [(0, 2)] * 2
    for driver in left:
        driver.go_on_with((0, 2))
    assert agreed(left, [True] * 2) == [None] * 2
    assert drivers[0].lose([2]) == {2}
    assert agreed(left[:1], [False]) == [(0,)]


def test_a_replica_that_is_lost_after_its_vote_has_taken_part() -> None:
    _, drivers = replicas(2)
    assert agreed(drivers, [True] * 2) == [None] * 2
    assert drivers[0].lose([1]) == {1}
    assert agreed(drivers[:1], [True]) == [(0,)]


def test_a_failure_elsewhere_ends_the_wait_for_the_others() -> None:
    store, drivers = replicas(2)
    store.set(FAULT, "an error in user code")
    with pytest.raises(ConnectionLost):
        drivers[0].agree(complete=True)
    assert drivers[0].lose([1]) is None


def test_all_ranks_of_a_lost_replica_are_ended_and_some_replicas_are_not_lost_alone() -> None:
    _, [first, *_] = replicas(3, stages=2)
    assert first.lose([0]) is None  # who logs, saves and has the store
    assert first.lose([1, 3]) is None
    assert first.lose([3]) == {2, 3}
    assert first.lose([4]) == {4, 5}
    first.end()
    assert first.lose([5]) is None


def test_a_rank_whose_replica_may_be_lost_waits_for_word_of_it_or_of_a_failure() -> None:
    store, drivers = replicas(2)
    began = time.monotonic()
    drivers[0].await_end()  # who cannot be lost does not
    assert time.monotonic() - began < 0.1
    store.set(FAULT, "")
    drivers[1].await_end()
