"""Ranks of replicas, by whichever number they are asked for."""

import pytest

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.errors import PlanError

MESH = [Coordinates(rank, 2, 3) for rank in range(6)]


def test_replicas_follow_each_other_and_the_first_rank_of_each_is_its_driver() -> None:
    assert [(c.dp_rank, c.pp_rank) for c in MESH] == [
        (replica, rank) for replica in (0, 1) for rank in (0, 1, 2)
    ]
    assert [c.rank for c in MESH if c.is_driver] == [0, 3]


def test_lightning_numbers_drivers_first() -> None:
    assert [c.lightning_rank for c in MESH] == [0, 2, 3, 1, 4, 5]


def test_ranks_may_have_other_coordinates_than_their_number_tells() -> None:
    order = (5, 4, 3, 2, 1, 0)
    mesh = [Coordinates(rank, 2, 3, order) for rank in range(6)]
    assert [(c.dp_rank, c.pp_rank) for c in reversed(mesh)] == [
        (c.dp_rank, c.pp_rank) for c in MESH
    ]
    assert mesh[4].at(0) == mesh[5]
    assert sorted(c.lightning_rank for c in mesh) == [*range(6)]


def test_a_rank_names_itself_with_its_stage_where_there_is_one() -> None:
    assert str(MESH[3]) == "rank 3 (driver, replica 1, stage 2)"
    assert str(MESH[4]) == "rank 4 (worker, replica 1, stage 0)"
    assert str(Coordinates(1, 1, 2, free=True)) == "rank 1 (worker, replica 0)"


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rank 4 .* replicas\(2\) x stages\(2\) = 4"):
        Coordinates(4, 2, 2)
