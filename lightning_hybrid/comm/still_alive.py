"""Liveness messages to peers that wait for this rank.

A rank that waits for the next command, or for the answer to one, gives up after the strategy's
time-out. What the other does meanwhile may take longer: hours of validation between two commands,
the capture of a large network before an answer. Its heartbeat tells that from a process that has
stopped.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.stuck_sends import SENDS
from lightning_hybrid.comm.threads import BackgroundThread

# a busy host may delay one or two: the peer gives up only when all are missing
_BEATS_PER_TIMEOUT = 4


class Heartbeat:
    """A thread that tells some peers now and then that this rank is alive.

    Args:
        channels: to the peers.
        timeout: how long the peers wait.

    Attributes:
        on: whether they wait.
    """

    def __init__(self, channels: Sequence[Channel], timeout: timedelta) -> None:
        self.on = True
        self._channels = tuple(channels)
        self._pause_s = timeout.total_seconds() / _BEATS_PER_TIMEOUT
        self._over = threading.Event()
        self._thread = BackgroundThread(self._run, "hybrid-heartbeat")
        self._thread.start()

    def close(self) -> None:
        """End it: when this has returned, no more messages are sent."""
        self._over.set()
        self._thread.join()
        SENDS.close()

    def _run(self) -> None:
        while not self._over.wait(self._pause_s):
            for channel in self._channels if self.on else ():
                with suppress(ConnectionLost):  # the main thread will notice
                    channel.send_still_alive()
