"""Word of a rank to those who wait for it while it computes.

A rank that waits for the next command, or for the answer to one, gives up after the strategy's
time-out. What the other does meanwhile may take longer: hours of validation between two commands,
the tracing of a large network before an answer. Its heartbeat tells that from a process that has
stopped.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from lightning_hybrid.comm.transport import ConnectionLost, Control

_BEATS_PER_TIMEOUT = 4


class Heartbeat:
    """A thread that tells some ranks now and then that this one lives.

    Args:
        control: the link to them.
        peers: who they are.
        timeout: how long they wait.

    Attributes:
        on: whether they wait.
    """

    def __init__(self, control: Control, peers: Sequence[int], timeout: timedelta) -> None:
        self.on = True
        self._control, self._peers = control, peers
        self._pause_s = timeout.total_seconds() / _BEATS_PER_TIMEOUT
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="hybrid-heartbeat")
        self._thread.start()

    def close(self) -> None:
        """End it: when this has returned, no more beats are sent."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._pause_s):
            for peer in self._peers if self.on else ():
                with suppress(ConnectionLost):  # the main thread will notice
                    self._control.say_still_here(peer)
