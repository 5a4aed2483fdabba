"""Background threads whose start raises when memory is short, instead of waiting for ever.

``Thread.start`` waits until the new thread has begun. If there is memory for its stack but not for
its first object, Python drops the thread with a line on the console, and the wait never ends. So
``Thread.start`` is called in another thread, which may wait for ever.
"""

import _thread
import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from typing import Any
from weakref import WeakSet

_BEGINS_WITHIN_S = 10.0
_ENDS_WITHIN_S, _SAYS_WITHIN_S = 5.0, 1.0


class BackgroundThread(Thread):
    """A thread that does not keep its process alive.

    Args:
        run: function that the thread calls.
        name: name of the thread.
        arguments: positional arguments of ``run``.
        awaited: whether the process, when it ends, gives the thread a few seconds to end. For
            threads that wait in torch's native code: if such a thread wakes while Python ends
            (until 3.13), the process aborts.
    """

    def __init__(
        self, run: Callable[..., object], name: str, *arguments: Any, awaited: bool = False
    ) -> None:
        super().__init__(target=run, args=arguments, daemon=True, name=name)
        if awaited:
            _AWAITED.add(self)
        self._begun = Event()
        self._failures: list[RuntimeError] = []

    def start(self) -> None:
        """Start the thread, and wait until it has begun.

        Raises:
            RuntimeError: there is no memory for the stack of a thread.
            MemoryError: the thread has not begun within 10 s: there is no memory for its first
                objects.
        """
        # `Thread.start` may wait for ever: another thread, which nobody waits for, calls it
        _thread.start_new_thread(self._begin, ())
        if not self._begun.wait(_BEGINS_WITHIN_S):
            raise MemoryError(
                f"A thread has not begun within {_BEGINS_WITHIN_S:.0f} s: this process has no "
                "memory left for it (`ulimit -v`), or is at another limit (`ulimit -a`)"
            )
        if self._failures:
            raise self._failures[0]

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, at most ``timeout`` seconds; ``None``: for ever.

        Returns at once if the thread could not start.
        """
        if self.is_alive():
            super().join(timeout)

    def run(self) -> None:
        """Run in the new thread: report that it has begun, then call the function."""
        self._begun.set()
        super().run()

    def _begin(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            self._failures.append(error)
            self._begun.set()


def end_process(reason: str) -> None:
    """Print a line on standard error, and kill this process.

    It is killed after a second at most, even if nobody reads what it prints.

    Args:
        reason: the line.
    """

    def say() -> None:
        with suppress(OSError):
            print(reason, file=sys.stderr, flush=True)

    says = BackgroundThread(say, "hybrid-says")
    with suppress(MemoryError, RuntimeError):
        says.start()
        says.join(_SAYS_WITHIN_S)
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


_AWAITED: WeakSet[Thread] = WeakSet()


@atexit.register
def _wait() -> None:
    """Before the process ends, wait a few seconds in all for the threads that are ``awaited``."""
    until = monotonic() + _ENDS_WITHIN_S
    for thread in filter(Thread.is_alive, list(_AWAITED)):
        thread.join(max(0.0, until - monotonic()))
