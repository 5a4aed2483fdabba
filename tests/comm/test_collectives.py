"""Objects and meetings of all ranks of a group."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from ranks import gloo_groups, together

from lightning_hybrid.comm.collectives import (
    agree,
    broadcast_object,
    fail_next_meeting,
    gather_objects,
    meet,
)
from lightning_hybrid.errors import HybridError


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    made = gloo_groups(30)
    yield made
    for group in made:
        group.shutdown()


def on_both(groups: list[Any], function: Any) -> list[Any]:
    return together(*(lambda rank=rank: function(groups[rank], rank) for rank in (0, 1)))


@pytest.mark.parametrize("source", [0, 1])
def test_an_object_of_any_rank_reaches_all(groups: list[Any], source: int) -> None:
    found = on_both(groups, lambda group, rank: broadcast_object(group, {"of": rank}, source))
    assert found == [{"of": source}] * 2


def test_all_objects_reach_all_ranks(groups: list[Any]) -> None:
    assert on_both(groups, gather_objects) == [[0, 1], [0, 1]]


def test_a_meeting_tells_whether_one_has_failed(groups: list[Any]) -> None:
    assert on_both(groups, lambda group, rank: meet(group)) == [True, True]
    assert on_both(groups, lambda group, rank: meet(group, failed=rank == 1)) == [False, False]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        *(((0.3, 0.3), True), ((-2.0, -2.0), True), ((0.0, 0.0), True)),
        *(((0.3, 0.5), False), ((-1.0, 1.0), False), ((0.0, None), False), ((None, None), False)),
    ],
)
def test_ranks_agree_where_all_have_the_same_number(
    groups: list[Any], numbers: tuple[float | None, float | None], expected: bool
) -> None:
    assert on_both(groups, lambda group, rank: agree(group, numbers[rank])) == [expected] * 2


def test_a_rank_that_leaves_fails_the_next_meeting(groups: list[Any]) -> None:
    def come(group: Any, rank: int) -> bool | None:
        return meet(group) if rank == 0 else fail_next_meeting(group, timedelta(seconds=30))

    assert on_both(groups, come)[0] is False


def test_who_waits_for_the_others_may_give_up(groups: list[Any]) -> None:
    def look() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        meet(groups[0], look=look)
    meet(groups[1])


def test_ranks_that_come_to_different_places_do_not_take_them_for_one(groups: list[Any]) -> None:
    def come(group: Any, rank: int) -> str:
        with pytest.raises(HybridError, match="in the same order") as raised:
            meet(group, place=f"barrier({rank})")
        return str(raised.value)

    assert all(
        f"come to barrier({rank})" in text for rank, text in enumerate(on_both(groups, come))
    )
    assert on_both(groups, lambda group, rank: meet(group, place="barrier")) == [True, True]
    mixed = on_both(groups, lambda group, rank: meet(group, failed=rank == 1, place=str(rank)))
    assert mixed == [False, False]
