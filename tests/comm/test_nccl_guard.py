"""A rank whose host waits on its device hears of a lost one, wherever that is in its replica."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist
from ranks import together

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.mesh import Mesh, make_world
from lightning_hybrid.comm.nccl_guard import NcclGuard


class Guarded:
    """A rank, with a guard unless it is to die: a thread that listens would keep its sockets open.

    Attributes:
        aborted: once what is under way on its device has been ended.
        lost: what that was ended with.
    """

    def __init__(self, mesh: Mesh, *, dies: bool) -> None:
        self.mesh, self.aborted, self.lost = mesh, Event(), ConnectionLost("nobody")
        abort = mesh.abort

        def note(lost: ConnectionLost) -> None:
            abort(lost)
            self.lost = lost
            self.aborted.set()

        mesh.abort = note  # type: ignore[method-assign, assignment]
        self.guard = None if dies else NcclGuard(mesh)


@pytest.fixture
def replica() -> Iterator[Callable[..., list[Guarded]]]:
    made: list[Guarded] = []

    def make(ranks: int, *, dies: bool = False) -> list[Guarded]:
        store = dist.HashStore()

        def rank(number: int) -> Guarded:
            place, world = Coordinates(number, 1, ranks), make_world(store, number, ranks)
            mesh = Mesh(place, store, world, "gloo", timedelta(seconds=30))
            return Guarded(mesh, dies=dies and number == ranks - 1)

        made.extend(together(*(lambda n=n: rank(n) for n in range(ranks))))
        return made

    yield make
    for each in made:
        if each.guard is not None:
            each.guard.close()
    for each in made:
        each.mesh.shutdown()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_others_hear_of_a_lost_rank_and_its_neighbour_knows_which_it_is(
    replica: Any, ranks: int
) -> None:
    driver, *others, last = replica(ranks, dies=True)
    last.mesh.shutdown()  # its sockets are closed, as those of a dead process
    for each in (driver, *others):
        assert each.aborted.wait(15)
    assert (others or [driver])[-1].lost.peer == str(last.mesh.coordinates)


def test_a_rank_that_fails_tells_the_others(replica: Any) -> None:
    driver, worker, last = replica(3)
    worker.guard.close(failed=True)
    for each in (driver, last):
        assert each.aborted.wait(15)
    assert isinstance(driver.lost, ConnectionLost)


def test_where_all_end_in_order_nothing_is_ended_and_a_second_run_has_guards_of_its_own(
    replica: Any,
) -> None:
    ranks = replica(3)
    for each in ranks:
        each.guard.close()
    again = [NcclGuard(each.mesh) for each in ranks]
    for guard in again:
        guard.close()
    assert not any(each.aborted.wait(0.2) for each in ranks)


def test_guarded_ranks_meet_to_make_groups(replica: Any) -> None:
    ranks = replica(3)
    groups = together(*(lambda mesh=each.mesh: mesh.siblings([2, 1, 0]) for each in ranks))
    assert sorted(group.rank() for group in groups) == [0, 1, 2]
    assert not any(each.aborted.is_set() for each in ranks)


def test_over_gloo_nobody_needs_one(replica: Any) -> None:
    [_, worker] = replica(2)
    assert NcclGuard.where_needed(worker.mesh) is None
    worker.mesh.backend = "nccl"
    guard = NcclGuard.where_needed(worker.mesh)
    assert guard is not None
    guard.close()
