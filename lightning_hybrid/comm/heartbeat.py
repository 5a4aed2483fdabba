"""Heartbeats: liveness messages to peers that wait for this rank.

A rank that waits for the next command, or for the answer to one, gives up after the strategy's
time-out. What its peer does meanwhile may take longer: hours of validation between two commands,
the capture of a large network before an answer. By its heartbeat the peer is told apart from a
process that has stopped. That a peer is silent is noticed where a rank waits for it
(``comm/connections.py``), and that a process was killed by the rank that has started it
(``process/killed_ranks.py``).
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.threads import BackgroundThread

# several, since a busy host may delay some: the peer gives up only when all are missing
_BEATS_PER_TIMEOUT = 4


class Heartbeat:
    """A thread that regularly sends :class:`StillAlive` to peers.

    Args:
        channels: channels to the peers.
        timeout: how long the peers wait before they give up.

    Attributes:
        on: whether messages are sent: the peers wait for this rank.
    """

    def __init__(self, channels: Sequence[Channel], timeout: timedelta) -> None:
        self.on = True
        self._channels = tuple(channels)
        self._pause_s = timeout.total_seconds() / _BEATS_PER_TIMEOUT
        self._over = threading.Event()
        self._thread = BackgroundThread(self._run, "hybrid-heartbeat")
        self._thread.start()

    def close(self) -> None:
        """End the thread: when this has returned, no more messages are sent."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._pause_s):
            for channel in self._channels if self.on else ():
                with suppress(ConnectionLost):  # the main thread will notice it by itself
                    channel.send_still_alive()
