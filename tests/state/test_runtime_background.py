"""Jobs are done in order beside the caller, and none after one that has failed."""

from threading import Event

import pytest

from lightning_hybrid.state.sharded_save_order import Background


def test_jobs_are_done_in_order_and_waited_for() -> None:
    background, may_go, done = Background(), Event(), list[int]()
    background.submit(lambda: may_go.wait(20))
    for number in range(3):
        background.submit(lambda number=number: done.append(number))
    background.wait(0.01)
    assert background.busy
    assert not done
    may_go.set()
    background.wait()
    assert done == [0, 1, 2]
    assert not background.busy


def test_an_error_is_raised_once_and_ends_what_was_to_follow() -> None:
    background, done = Background(), list[int]()
    background.submit(lambda: 1 / 0)
    background.submit(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        background.wait()
    assert not done
    background.submit(lambda: done.append(2))
    background.wait()
    assert done == [2]
