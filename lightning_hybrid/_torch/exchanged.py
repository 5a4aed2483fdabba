"""How something of torch's is exchanged for a while, and put back as it was."""

import threading
from collections.abc import Callable


class Exchanged:
    """A context in which something of torch's is exchanged, for all threads of the process.

    The last thread that leaves it puts back what was there. What takes the place of torch's own
    must do the same as that for threads that capture nothing.

    Args:
        put: exchanges.
        back: puts back.
    """

    def __init__(self, put: Callable[[], object], back: Callable[[], object]) -> None:
        self._put, self._back = put, back
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._put()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._back()
