"""Ranks that torchrun starts again, with a store in which the ranks before them have written."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from lightning_hybrid.errors import RemoteError
from lightning_hybrid.process.starts import of_this_start

SOON, LATER = timedelta(seconds=0.2), timedelta(seconds=30)


def start(store: Store, ranks: list[int], size: int, timeout: timedelta) -> list[Future[Store]]:
    """Let ranks meet, in threads, one coming a little after the other."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = []
        for rank in ranks:
            found.append(pool.submit(of_this_start, store, rank, size, timeout))
            time.sleep(0.05)
        return found


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0]])
def test_ranks_of_one_start_share_what_no_other_start_sees(ranks: list[int]) -> None:
    store, parts = HashStore(), list[list[Store]]()
    for number in range(3):
        parts.append([each.result() for each in start(store, ranks, 3, LATER)])
        parts[-1][0].set("address", f"of start {number}")
    for number, part in enumerate(parts):
        assert [each.get("address") for each in part] == [f"of start {number}".encode()] * 3


def test_a_start_with_fewer_ranks_does_not_wait_for_those_of_before() -> None:
    store = HashStore()
    start(store, [0, 1, 2], 3, LATER)
    assert len([each.result() for each in start(store, [1, 0], 2, LATER)]) == 2


@pytest.mark.parametrize("ended", [[0], [1], [0, 1]])
def test_ranks_that_ended_while_they_met_are_not_taken_for_others(ended: list[int]) -> None:
    store = HashStore()
    for rank, each in zip(ended, start(store, ended, 3, SOON)):
        missing = (
            "rank 0" if rank else "ranks 1, 2" if ended == [0] else "ranks (1, )?2"
        )  # a thread may be late
        with pytest.raises(RemoteError, match=f"Rank {rank} has waited .* for {missing} of 3"):
            each.result()
    first, *others = [each.result() for each in start(store, [1, 2, 0], 3, LATER)]
    first.set("address", "new")
    assert {each.get("address") for each in others} == {b"new"}
