"""Threads beside the one of the user's code, which begin or say that they cannot.

``Thread.start`` waits until the new thread has begun. Where there is memory for its stack and none
for its first object, Python drops it with a line on the console, and the wait never ends. So that
wait is left to a thread of its own.
"""

import _thread
import atexit
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Any
from weakref import WeakSet

_BEGINS_WITHIN_S = 10.0
_ENDS_WITHIN_S = 5.0


class BackgroundThread(Thread):
    """A thread that does not keep its process alive.

    Args:
        run: what it does.
        name: of the thread.
        arguments: of ``run``.
        awaited: give it a few seconds at the end of the process, since it waits in torch's own
            code: what wakes there while Python ends (until 3.13) aborts the process.
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
        """Begin.

        Raises:
            RuntimeError: there is no room for the stack of a thread.
            MemoryError: there is, and for nothing else.
        """
        # `Thread.start` may wait for ever: a thread that nobody waits for calls it
        _thread.start_new_thread(self._begin, ())
        if not self._begun.wait(_BEGINS_WITHIN_S):
            raise MemoryError(
                f"A thread has not begun within {_BEGINS_WITHIN_S:.0f} s: this process has no "
                "memory left for it (see `ulimit -v`)"
            )
        if self._failures:
            raise self._failures[0]

    def run(self) -> None:
        """What it does."""
        self._begun.set()
        super().run()

    def _begin(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            self._failures.append(error)
            self._begun.set()


_AWAITED: WeakSet[Thread] = WeakSet()


@atexit.register
def _wait() -> None:
    until = monotonic() + _ENDS_WITHIN_S
    for thread in filter(Thread.is_alive, list(_AWAITED)):
        thread.join(max(0.0, until - monotonic()))
