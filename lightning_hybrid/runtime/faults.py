"""The first error of a run, on every rank: who fails writes it down, who follows reads it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import TypeVar

from lightning_hybrid.errors import RemoteError
from lightning_hybrid.runtime.mesh import Mesh
from lightning_hybrid.runtime.transport import ConnectionLost, is_late, meet

GRACE_S = 8.0
"""How long the ranks of a failed run may take to say why and to end, before they are killed."""

_KEY = "fault"
_LOOK_EVERY_S = 1.0
_WITNESS_DELAY_S, _LATE_DELAY_S = 0.5, 2.0
_MEETING_S, _READING_S = 2.0, 0.2
_STORE_S = 3.0  # its host may be the rank that died, or that does not answer

T = TypeVar("T")


def first_fault(mesh: Mesh | None, error: BaseException, text: str) -> str | None:
    """Report a failure of this rank.

    Args:
        mesh: the groups; ``None`` before there are any.
        error: what was raised.
        text: how to report it if it is the first.

    Returns:
        What another rank has failed with before, or told this one; ``None``: this is the first.
    """
    told = isinstance(error, RemoteError) and not isinstance(error, ConnectionLost)
    if told:
        text = str(error)
    elif mesh is not None and is_hearsay(error):
        time.sleep(_WITNESS_DELAY_S)
    if mesh is not None:
        if isinstance(error, ConnectionLost) and error.late:
            _let_the_nearest_speak(mesh, error.peer)
        first = _within_time(lambda: mesh.store.compare_set(_KEY, "", text).decode(), text)
        if first != text:
            return first
    return text if told else None


def _let_the_nearest_speak(mesh: Mesh, peer: str | None) -> None:
    """When one rank stops, those who wait for it and those who wait for them give up together.

    Each says that it is here; who has waited for one of these does not know the cause.
    """

    def wait_if_it_lives() -> None:
        mesh.store.set(f"here: {mesh.place}", "")
        time.sleep(_LATE_DELAY_S)
        if peer is None or mesh.store.check([f"here: {peer}"]):
            time.sleep(_WITNESS_DELAY_S)

    _within_time(wait_if_it_lives, None, _LATE_DELAY_S + _STORE_S)


def read_fault(mesh: Mesh) -> str:
    """What the rank that failed first has reported."""
    return _within_time(lambda: mesh.store.get(_KEY).decode(), "another rank has failed")


def _within_time(ask: Callable[[], T], otherwise: T, limit_s: float = _STORE_S) -> T:
    """Ask the store. A client of one whose process has stopped would wait for ever."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else otherwise


class Watch:
    """Ends a process that is busy with the user's code while the run has failed elsewhere.

    A rank that talks to others hears of it there. One that loads data or draws figures for an
    hour would be an orphan for as long.

    Args:
        mesh: the groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._over = Event()
        Thread(target=self._run, daemon=True, name="hybrid-watch").start()

    def close(self) -> None:
        """This rank ends by itself."""
        self._over.set()

    def _run(self) -> None:
        while not self._failed():
            if self._over.wait(_LOOK_EVERY_S):
                return
        if self._over.wait(GRACE_S):
            return
        first = _within_time(lambda: self._mesh.store.get(_KEY).decode(), "rank 0 is gone")
        print(
            f"{self._mesh.place} is killed: it did not end within {GRACE_S:.0f} s of a failure "
            f"elsewhere: {first.strip().splitlines()[-1]}",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)

    def _failed(self) -> bool:
        try:
            return bool(self._mesh.store.check([_KEY]))
        except RuntimeError:  # its host, rank 0, is gone
            return True


def say_at_next_meeting(mesh: Mesh | None) -> None:
    """Before or after a run all ranks meet now and then: tell those who wait there already.

    Who comes later finds this rank gone.
    """
    if mesh is None:
        return
    teller = Thread(target=_tell, args=(mesh,), daemon=True)
    teller.start()
    teller.join(_MEETING_S)
    time.sleep(_READING_S)  # this rank may host the store that they read now


def _tell(mesh: Mesh) -> None:
    with suppress(ConnectionLost):
        meet(mesh.world, failed=True)


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` only says that a peer is gone (from us, or from gloo under Lightning)."""
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, ConnectionLost) or (
        isinstance(error, RuntimeError)
        and (is_late(error) or any(words in str(error) for words in gone))
    )


def is_hearsay(error: BaseException) -> bool:
    """Whether somebody is gone and this rank cannot tell who: a direct neighbour can."""
    named = isinstance(error, ConnectionLost) and error.peer is not None
    return is_loss(error) and not named
