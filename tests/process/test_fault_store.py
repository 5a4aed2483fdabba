"""A process whose run has failed elsewhere is ended; one with a broken connection is not."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hybrid.comm import threads
from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.process import watchdogs
from lightning_hybrid.process.first_fault import first_fault, tell_lost
from lightning_hybrid.process.watchdogs import FaultWatchdog

HERE = Coordinates(1, 1, 3)
NAMES = {rank: f"rank {rank}" for rank in range(3)}


def watched(store: Any, here: Coordinates = HERE, timeout_s: float = 30) -> FaultWatchdog:
    watch = FaultWatchdog(here, store, timedelta(seconds=timeout_s))
    watch.start()
    return watch


class Flaky:
    """A store whose first connection breaks after some looks."""

    def __init__(self, store: Any, good: int) -> None:
        self._store, self._good = store, good
        self.looks = threading.Semaphore(0)

    def check(self, keys: list[str]) -> bool:
        self._good -= 1
        if self._good < 0:
            raise RuntimeError("Broken pipe")
        self.looks.release()
        return self._store.check(keys)

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def clone(self) -> "Flaky":
        other = Flaky(self._store, self._good)
        self._good, other.looks = 10**6, self.looks  # only the first connection breaks
        return other


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set where this process would have been killed."""
    event = threading.Event()
    monkeypatch.setattr(watchdogs, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(watchdogs, "GRACE_S", 0.1)
    monkeypatch.setattr(threads.os, "kill", lambda *_: event.set())
    return event


def test_a_broken_connection_to_a_store_that_lives_is_no_failure(killed: threading.Event) -> None:
    store = Flaky(dist.HashStore(), good=2)
    watch = watched(store)
    for _ in range(20):
        assert store.looks.acquire(timeout=30)
    watch.close()
    assert not killed.is_set()


def test_a_recorded_failure_ends_a_process_that_goes_on(
    killed: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    store.set("fault", Failure.of(ValueError("on purpose"), "rank 0").to_json())
    watch = watched(store)
    assert killed.wait(30)
    watch.close()
    assert f"{HERE} is killed" in (said := capfd.readouterr().err)
    assert "ValueError: on purpose" in said


def test_a_store_whose_host_is_gone_ends_a_process_that_goes_on(
    killed: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True)
    store = dist.TCPStore("127.0.0.1", host.port, None, False)
    watch = watched(store)
    while not host.check(["signs of life of rank 1"]):
        time.sleep(0.01)
    del host
    assert killed.wait(30)
    watch.close()
    assert "rank 0, the host of the store, is gone" in capfd.readouterr().err


def test_a_rank_whose_request_waits_for_others_hears_of_their_failure_all_the_same(
    killed: threading.Event,
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True)
    store = dist.TCPStore("127.0.0.1", host.port, None, False)
    # as a process group's constructor asks for the address of a peer
    waits = threading.Thread(target=lambda: store.get("address"))
    waits.start()
    watch = watched(store)
    host.set("fault", Failure.of(OSError("on purpose"), "rank 0").to_json())
    assert killed.wait(30)
    assert waits.is_alive()
    host.set("address", "")
    waits.join(30)
    watch.close()


def test_a_closed_watch_has_no_thread() -> None:
    watched(dist.HashStore()).close()
    assert "hybrid-watch" not in [thread.name for thread in threading.enumerate()]


class Mesh:
    """As much of a mesh as is needed here."""

    coordinates = Coordinates(1, 1, 2)

    def __init__(self) -> None:
        self.store = dist.HashStore()


def test_the_first_failure_is_that_of_all_and_alike_ones_stay_each_ranks_own() -> None:
    mesh: Any = Mesh()
    assert first_fault(mesh, ValueError("a"), "rank 0") is None
    assert first_fault(mesh, ValueError("a"), "rank 1") is None
    other = first_fault(mesh, KeyError("b"), "rank 2")
    assert other is not None
    assert str(other.exception()) == "a"
    assert type(other.exception()) is ValueError


def test_what_gloo_says_of_a_lost_peer_is_of_no_use_elsewhere() -> None:
    mesh: Any = Mesh()
    assert first_fault(mesh, RuntimeError("Connection closed by peer"), "rank 0") is None
    other = first_fault(mesh, RuntimeError("Connection closed by peer"), "rank 1")
    assert other is not None
    assert not other.packed


def test_who_waits_gives_up_on_a_rank_that_shows_no_sign_of_life_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdogs, "_LOOK_EVERY_S", 0.02)
    store = dist.HashStore()
    watches = [watched(store, Coordinates(rank, 1, 3), timeout_s=1) for rank in range(3)]
    look = watches[0].wait_for(NAMES, "a barrier")
    until = time.monotonic() + 2
    while time.monotonic() < until:  # all live
        look()
        time.sleep(0.02)
    watches[2].close()

    def wait() -> None:
        for _ in range(1000):
            look()
            time.sleep(0.02)

    with pytest.raises(ConnectionLost, match=r"Lost rank 2\..* comes to a barrier later") as raised:
        wait()
    assert raised.value.late
    for watch in watches:
        watch.close()


def test_who_waits_gives_up_on_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = FaultWatchdog(
        HERE, dist.HashStore(), timedelta(seconds=0.1)
    )  # its thread hears nothing
    look = watch.wait_for(NAMES, "a barrier")
    look()
    time.sleep(0.2)
    with pytest.raises(ConnectionLost, match=r"Lost rank 0\."):
        look()


class Server:
    """The two ends of a store, of which one host is gone later."""

    coordinates = HERE

    def __init__(self) -> None:
        self._host: Any = dist.TCPStore("127.0.0.1", 0, None, True)
        self.store = dist.TCPStore("127.0.0.1", self._host.port, None, False)

    def end(self) -> None:
        del self._host


def test_a_loss_that_cannot_be_named_is_that_of_the_stores_host_if_it_is_gone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ranks: Any = Server()
    ranks.end()
    first = first_fault(ranks, ConnectionLost("Lost a rank of the group."), str(HERE))
    assert first is not None
    assert first.text.startswith("Lost rank 0 (driver, replica 0, stage 2). It was killed")
    assert capfd.readouterr().err == ""  # no stack of torch's


def test_who_has_started_a_rank_that_was_killed_names_it_for_all() -> None:
    ranks: Any = Mesh()
    tell_lost(ranks, [1])
    first = first_fault(ranks, ConnectionLost("Lost a rank of the group."), "rank 0")
    assert first is not None
    assert str(first.exception()).startswith("Lost rank 1 (worker, replica 0, stage 0). It was")
