"""How something of torch's is exchanged for a while, and put back as it was."""

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any


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


def exchanged_methods(
    instead: Sequence[tuple[Any, str, Callable[..., Any]]],
    wanted: Callable[[], bool],
    tables: Sequence[Any] = (),
) -> Exchanged:
    """A context in which methods of classes, or functions of modules, are exchanged.

    Args:
        instead: the class or module, the name, and what is called instead: with what was there, and
            its arguments. (A call with keywords goes to what was there.)
        wanted: whether it is to be called in this thread.
        tables: functions that keep tables of such methods, and so may have those of before.
    """
    found = [(owner, name, vars(owner).get(name)) for owner, name, _ in instead]
    made = [(o, name, _chosen(new, getattr(o, name), wanted)) for o, name, new in instead]

    def put() -> None:
        for owner, name, new in made:
            setattr(owner, name, new)
        for table in tables:
            table.cache_clear()

    def back() -> None:
        for owner, name, own in found:
            delattr(owner, name) if own is None else setattr(owner, name, own)

    return Exchanged(put, back)


def _chosen(new: Callable[..., Any], own: Any, wanted: Callable[[], bool]) -> Any:
    @wraps(own)
    def chosen(*arguments: Any, **keywords: Any) -> Any:
        if keywords or not wanted():
            return own(*arguments, **keywords)
        return new(own, *arguments)

    return chosen
