"""A started rank does not outlive the process that has started it, before they have met.

From there on connections tell. But who imports while rank 0 is killed would wait for the store of
a process that is gone, for as long as a store may take to begin.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

_PARENT = "LIGHTNING_HYBRID_STARTED_BY"
_LOOK_EVERY_S = 0.5


class _Process:
    """What ends the watch of this process; set: nobody watches."""

    met = Event()


@contextmanager
def starting_ranks() -> Iterator[None]:
    """Inside, processes that this one starts are to watch it."""
    os.environ[_PARENT] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_PARENT, None)


def watch_parent() -> None:
    """In a started process: end with the one that has started it, until :func:`have_met`."""
    parent = os.environ.pop(_PARENT, None)
    if parent is not None and int(parent) != os.getpid():
        _Process.met.clear()  # a forked process has that of its parent, which may have met others
        Thread(target=_watch, args=(int(parent),), daemon=True, name="hybrid-orphans").start()


def have_met() -> None:
    """All ranks have met: connections tell who is gone, and scripts may end one by one."""
    _Process.met.set()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        if _Process.met.wait(_LOOK_EVERY_S):
            return
    print(
        f"Process {os.getpid()} ends: process {parent}, which has started it as a rank, is gone.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
