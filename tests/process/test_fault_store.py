"""A process whose run has failed elsewhere is ended; one with a broken connection is not."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.process import faults
from lightning_hybrid.process.faults import Watch, first_fault


class Flaky:
    """A connection to a store that breaks after some looks."""

    def __init__(self, store: Any, good: int) -> None:
        self._store, self._good = store, good
        self.looks = threading.Semaphore(0)

    def check(self, keys: list[str]) -> bool:
        self._good -= 1
        if self._good < 0:
            raise RuntimeError("Broken pipe")
        self.looks.release()
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def clone(self) -> "Flaky":
        other = Flaky(self._store, 10**6)
        other.looks = self.looks
        return other


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set where this process would have been killed."""
    event = threading.Event()
    monkeypatch.setattr(faults, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(faults, "GRACE_S", 0.1)
    monkeypatch.setattr(faults.os, "kill", lambda *_: event.set())
    return event


def test_a_broken_connection_to_a_store_that_lives_is_no_failure(killed: threading.Event) -> None:
    store = Flaky(dist.HashStore(), good=2)
    watch = Watch("rank 1", store)  # type: ignore[arg-type]
    for _ in range(20):
        assert store.looks.acquire(timeout=30)
    watch.close()
    assert not killed.is_set()


def test_a_recorded_failure_ends_a_process_that_goes_on(
    killed: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    store.set("fault", Failure.of(ValueError("on purpose"), "rank 0").to_json())
    watch = Watch("rank 1", store)
    assert killed.wait(30)
    watch.close()
    assert "rank 1 is killed" in (said := capfd.readouterr().err)
    assert "ValueError: on purpose" in said


def test_a_store_whose_host_is_gone_ends_a_process_that_goes_on(
    killed: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True)
    store = dist.TCPStore("127.0.0.1", host.port, None, False)
    watch = Watch("rank 1", store)
    del host
    assert killed.wait(30)
    watch.close()
    assert "rank 0, the host of the store, is gone" in capfd.readouterr().err


def test_a_closed_watch_has_no_thread() -> None:
    Watch("rank 1", dist.HashStore()).close()
    assert "hybrid-watch" not in [thread.name for thread in threading.enumerate()]


class Mesh:
    """As much of a mesh as is needed here."""

    coordinates = "rank 0"

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
