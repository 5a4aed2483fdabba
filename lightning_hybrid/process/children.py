"""The processes that a script starts as ranks: they end with it, and it sees who has ended.

Before they have met, a started rank watches the process that has started it: who imports while rank
0 is killed would wait for the store of a process that is gone, for as long as a store may take to
begin. From there on connections tell.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

from lightning_hybrid.errors import RemoteError
from lightning_hybrid.process.faults import GRACE_S

_PARENT = "LIGHTNING_HYBRID_STARTED_BY"
_LOOK_EVERY_S = 0.5


class Children:
    """The processes that this one has started, by whichever Trainer, for all Trainers."""

    processes: Sequence["subprocess.Popen[bytes]"] = ()
    failed = ""  # the class of the error with which the last run has failed, here


def not_caught() -> str:
    """The text for a process that ends because it did not catch an error that others caught."""
    return (
        f"it did not catch the {Children.failed} of an earlier run, which this process has caught. "
        "`except` holds on every rank if the class of the error stands at the top of a module; one "
        "that is made in a function cannot be sent to other ranks"
    )


def miss_nobody() -> None:
    """After a run that failed: a process that has ended with it will not come to the next one.

    Raises:
        RemoteError: there is such a process.
    """
    ended = next((child for child in Children.processes if child.poll()), None)
    if Children.failed and ended is not None:
        raise RemoteError(
            f"A process of this script (PID {ended.pid}) has ended with code {ended.returncode}: "
            f"{not_caught()}. No run can follow; start the script anew."
        )


def leave_nobody() -> None:
    """At the end of a script that failed: kill the children that do not end by themselves.

    They notice the end of this process by its closed connections, so that it cannot wait for
    them; another one does, which has none of these open.
    """
    children = [child for child in Children.processes if child.poll() is None]
    if not Children.failed or not children or not hasattr(os, "fork") or os.fork():
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(_exists(child.pid) for child in children):
        time.sleep(0.1)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
    os._exit(0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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
