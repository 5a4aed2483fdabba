"""Heartbeats: messages that tell waiting peers that this rank is alive.

A rank that waits for the next command, or for the answer to a command, gives up after the
strategy's time-out. What its peer does meanwhile possibly takes longer: hours of validation between
two commands, the capture of a large network before an answer. Heartbeats distinguish a busy peer
from a process that has stopped.

Other losses are noticed elsewhere: over gloo a lost or silent peer by the rank that waits for it
(``comm/connections.py``), over NCCL a lost rank by ``comm/nccl_guard.py``, a killed process by the
rank that has started it (``process/killed_ranks.py``), and a stopped process by
``process/watchdogs.py``.
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
    """A thread that regularly sends :class:`StillAlive` to peers; it starts when this is made.

    Args:
        channels: channels to the peers.
        timeout: how long the peers wait before they give up.

    Attributes:
        on: whether messages are sent. Set it to false while no peer waits for this rank.
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
