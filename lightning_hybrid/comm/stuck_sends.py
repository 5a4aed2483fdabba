"""Sends that nothing would end: gloo forgets some of them when their peer dies.

The thread that finds a connection broken tells all transfers that wait on it, and then puts the
one it was writing itself beside them, which so hears of nothing and waits for its time-out, half
an hour by default. No call of torch's wakes it, but a new transfer on the connection raises at
once. So sends that last are looked at by another thread; if the peer is gone and they go on
waiting, the process ends.
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
"""Raises if the peer of a send is gone."""


class StuckSends:
    """The sends of this process that are waited for.

    Args:
        end: called with the reason when one is stuck.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._waiting: dict[int, tuple[float, Probe]] = {}
        self._lock = Lock()
        self._thread: Thread | None = None
        self._over = Event()

    @contextmanager
    def watched(self, probe: Probe) -> Iterator[None]:
        """Inside, a send is waited for.

        Args:
            probe: see :data:`Probe`.
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
        """Look no more, until the next send is waited for."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._over.set()
        if thread is not None:
            thread.join()

    def _run(self, over: Event) -> None:
        gone: dict[int, tuple[float, str]] = {}
        while not over.wait(_LOOK_EVERY_S):
            now, waiting = monotonic(), dict(self._waiting)
            # a number may come back for another send, to a peer that lives
            gone = {key: seen for key, seen in gone.items() if key in waiting}
            for key, (since, probe) in waiting.items():
                # most sends are over by then, and a probe is a transfer of its own
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
    # no exception reaches a thread that waits inside of gloo
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


SENDS = StuckSends(_kill)
"""Of this process."""
if hasattr(os, "register_at_fork"):  # threads stay with the parent
    os.register_at_fork(after_in_child=lambda: SENDS.__init__(_kill))  # type: ignore[misc]
