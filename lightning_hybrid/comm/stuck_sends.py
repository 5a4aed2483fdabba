"""Watch sends that would wait for ever, since gloo has forgotten them.

gloo forgets some sends whose peer is gone: the thread that finds a connection broken fails all
transfers that wait on it, and only then adds the one that it was writing itself. That one waits for
its time-out, half an hour by default. No call of torch wakes it, but a new transfer on the
connection raises at once. So :class:`StuckSends` has another thread probe the connection of every
send that takes more than a second; if the peer is gone and the send still waits after some seconds,
the process is killed.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from time import monotonic

from lightning_hybrid.comm.threads import BackgroundThread

GRACE_S = 8.0
"""How long a send may go on waiting for a peer that is known to be gone."""
_LOOK_EVERY_S = 1.0

Probe = Callable[[], object]
"""A function that raises a ``RuntimeError`` if the peer of a send is gone."""


class StuckSends:
    """Watches the sends that threads of this process wait for.

    Args:
        end: called with the reason when a send is stuck.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._waiting: dict[int, tuple[float, Probe]] = {}
        self._lock = Lock()
        self._thread: Thread | None = None
        self._over = Event()

    @contextmanager
    def watched(self, probe: Probe) -> Iterator[None]:
        """Inside, the caller waits for a send, which is watched.

        Args:
            probe: tests whether the peer of the send is gone.
        """
        if self._thread is None:
            self._begin()
        key = id(probe)
        self._waiting[key] = monotonic(), probe
        try:
            yield
        finally:
            self._waiting.pop(key, None)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._over = Event()
                self._thread = BackgroundThread(self._run, "hybrid-sends", self._over)
                self._thread.start()

    def close(self) -> None:
        """End the watching thread; the next :meth:`watched` begins another one."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._over.set()
        if thread is not None:
            thread.join()

    def _run(self, over: Event) -> None:
        gone: dict[int, tuple[float, str]] = {}
        while not over.wait(_LOOK_EVERY_S):
            now, waiting = monotonic(), dict(self._waiting)
            # forget sends that have ended: the id of a probe may be used again for another peer
            gone = {key: seen for key, seen in gone.items() if key in waiting}
            for key, (since, probe) in waiting.items():
                # only sends that last: each probe begins a transfer
                if key not in gone and now - since > _LOOK_EVERY_S:
                    try:
                        probe()
                    except RuntimeError as error:
                        gone[key] = now, str(error)
            for since, reason in gone.values():
                if now - since > GRACE_S:
                    self._end(reason)
                    return


def _kill(reason: str) -> None:
    print(
        f"Process {os.getpid()} is killed: a send of it would wait for ever. {reason}",
        file=sys.stderr,
        flush=True,
    )
    # an exception cannot wake a thread that waits inside of gloo
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


SENDS = StuckSends(_kill)
"""The watched sends of this process."""
if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads
    os.register_at_fork(after_in_child=lambda: SENDS.__init__(_kill))  # type: ignore[misc]
