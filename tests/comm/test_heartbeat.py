"""A rank that is busy says that it is alive, and stops to say so when it is told."""

import threading
from datetime import timedelta
from typing import Any

from in_memory import memory_channels

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.heartbeat import Heartbeat
from lightning_hybrid.comm.protocol import Answer


class Recorder:
    """A channel that notes heartbeats."""

    def __init__(self, error: Exception | None = None) -> None:
        self.heard, self._error = threading.Event(), error

    def send_still_alive(self) -> None:
        self.heard.set()
        if self._error is not None:
            raise self._error


def test_a_peer_that_waits_does_not_notice_it() -> None:
    here, there = memory_channels()
    beside = Recorder()
    heartbeat = Heartbeat([here, beside], timedelta(seconds=0.004))  # type: ignore[list-item]
    assert beside.heard.wait(30)
    here.send(Answer(value="word"))
    assert there.receive(Answer).value == "word"
    heartbeat.close()


def test_a_closed_one_has_no_thread_and_sends_nothing_more() -> None:
    recorder = Recorder()
    heartbeat = Heartbeat([recorder], timedelta(seconds=0.004))  # type: ignore[list-item]
    assert recorder.heard.wait(30)
    heartbeat.close()
    recorder.heard.clear()
    assert "hybrid-heartbeat" not in [thread.name for thread in threading.enumerate()]
    assert not recorder.heard.wait(0.05)


def test_one_that_is_off_is_silent() -> None:
    off, on = Recorder(), Recorder()
    silent: Any = Heartbeat([off], timedelta(seconds=0.004))  # type: ignore[list-item]
    silent.on = False
    off.heard.clear()
    other = Heartbeat([on], timedelta(seconds=0.04))  # type: ignore[list-item]
    assert on.heard.wait(30)
    other.close()
    silent.close()


def test_it_goes_on_for_others_when_one_peer_is_lost() -> None:
    lost, other = Recorder(ConnectionLost("Lost rank 1")), Recorder()
    heartbeat = Heartbeat([lost, other], timedelta(seconds=0.04))  # type: ignore[list-item]
    assert lost.heard.wait(30)
    assert other.heard.wait(30)
    heartbeat.close()
