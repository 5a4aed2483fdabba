"""What passes between two ranks beside tensors: in order, whole, and to the end."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.heartbeat import Heartbeat
from lightning_hybrid.comm.transport import ConnectionLost, Control
from lightning_hybrid.errors import RemoteError
from lightning_hybrid.runtime.driver import Driver

NAMES = ("rank 0", "rank 1")
FAILURE = Failure.of(ValueError("on purpose"), "rank 1")


@pytest.fixture
def ends() -> Iterator[list[Control]]:
    """The two ends of a control link, in one process."""
    store, groups = dist.HashStore(), [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    together(lambda: make(0), lambda: make(1))
    yield [Control(group, NAMES) for group in groups]
    for group in groups:
        group.shutdown()


def together(*functions: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_frames_and_tensors_pass_between_beats(ends: list[Control]) -> None:
    here, there = ends
    heartbeat = Heartbeat(here, [1], timedelta(seconds=0.01))
    weights = {"a": torch.arange(5.0), "empty": torch.empty(0)}

    def speak() -> None:
        for number in range(200):
            here.tell(1, number, number)
            here.send_tensors(1, weights)
        here.flush()

    found = []
    together(
        speak, lambda: found.extend((there.hear(0), there.receive_tensors(0)) for _ in range(200))
    )
    heartbeat.close()
    assert [frame[0] for frame, _ in found] == list(range(200))
    assert all(torch.equal(tensors["a"], weights["a"]) for _, tensors in found)


def test_a_rank_that_listens_late_hears_what_came_behind_many_beats(ends: list[Control]) -> None:
    here, there = ends
    for _ in range(400):
        here.say_still_here(1)
    here.tell(1, 7, payload="word")
    assert there.hear(0)[::2] == (7, "word")


def test_a_closed_heartbeat_has_no_thread() -> None:
    control: Any = SimpleNamespace(say_still_here=lambda peer: None)
    heartbeat = Heartbeat(control, [1], timedelta(hours=1))
    heartbeat.close()
    assert "hybrid-heartbeat" not in [thread.name for thread in threading.enumerate()]


def test_a_heartbeat_goes_on_for_others_when_one_is_lost() -> None:
    heard = threading.Event()

    def say_still_here(peer: int) -> None:
        if peer == 1:
            raise ConnectionLost("Lost rank 1")
        heard.set()

    control: Any = SimpleNamespace(say_still_here=say_still_here)
    heartbeat = Heartbeat(control, [1, 2], timedelta(seconds=0.04))
    assert heard.wait(30)
    heartbeat.close()


def test_who_waits_for_a_rank_that_leaves_hears_why(ends: list[Control]) -> None:
    here, there = ends
    there.say_goodbye(FAILURE)
    for _ in range(2):  # nothing more will come
        with pytest.raises(ValueError, match="on purpose") as found:
            here.hear(1)
        assert isinstance(found.value.__cause__, RemoteError)


def test_a_lost_worker_does_not_keep_a_failure_from_the_others() -> None:
    told = []

    def tell(worker: int, *_: Any, payload: Any) -> None:
        if worker == 1:
            raise ConnectionLost("Lost rank 1")
        told.append((worker, payload))

    driver: Any = SimpleNamespace(
        _stop_heartbeat=lambda: None, _workers=(1, 2), _control=SimpleNamespace(tell=tell)
    )
    Driver.abort(driver, FAILURE)
    assert told == [(2, FAILURE)]
