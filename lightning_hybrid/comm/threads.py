"""Threads beside the one of the user's code, which begin or say that they cannot.

``Thread.start`` waits until the new thread has begun. Where there is memory for its stack and none
for its first object, Python drops it with a line on the console, and the wait never ends.
"""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

_BEGINS_WITHIN_S = 10.0


class BackgroundThread(Thread):
    """A thread that does not keep its process alive.

    Args:
        run: what it does.
        name: of the thread.
        arguments: of ``run``.
    """

    def __init__(self, run: Callable[..., object], name: str, *arguments: Any) -> None:
        super().__init__(target=run, args=arguments, daemon=True, name=name)
        self._started: Event = _Begun()  # what `start` waits for, in all versions of Python


class _Begun(Event):
    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_BEGINS_WITHIN_S if timeout is None else timeout):
            raise MemoryError(
                f"A thread has not begun within {_BEGINS_WITHIN_S:.0f} s: this process has no "
                "memory left for it (see `ulimit -v`)"
            )
        return True
