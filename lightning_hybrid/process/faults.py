"""The first error of a run, on every rank: who fails writes it down, who follows reads it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from socket import create_connection
from threading import Event
from typing import Any, Protocol, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_hybrid.comm import (
    BackgroundThread,
    ConnectionLost,
    Coordinates,
    Failure,
    Group,
    fail_next_meeting,
    is_gone,
    is_late,
    raised,
    told_text,
)

GRACE_S = 8.0
"""How long the ranks of a failed run may take to say why and to end, before they are killed."""

_KEY = "fault"
_LOOK_EVERY_S = 1.0
_WITNESS_DELAY_S, _LATE_DELAY_S = 0.5, 2.0
_MEETING, _READING_S = timedelta(seconds=2), 0.2
_STORE_S = 3.0  # its host may be the rank that died, or that does not answer
_TRIES = 3

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks, as one of them knows them: it may have coordinates in a mesh, or not yet."""

    @property
    def coordinates(self) -> Coordinates:
        """This rank."""

    @property
    def store(self) -> Store:
        """The one of all ranks."""

    @property
    def world(self) -> Group:
        """The group of all ranks."""


def first_fault(ranks: Ranks | None, error: BaseException, where: str) -> Failure | None:
    """Report a failure of this rank.

    Args:
        ranks: all of them; ``None`` before they have met.
        error: what was raised.
        where: this rank.

    Returns:
        What another rank has failed with before, or told this one; ``None``: this is the first, or
        the first one on another rank was the same.
    """
    told, mine = told_text(error) is not None, Failure.of(error, where)
    if is_loss(error):  # gloo's own error, from under Lightning, is of no use on other ranks
        mine = replace(mine, packed="")
    if ranks is not None:
        if not told and is_unnamed_loss(error):
            time.sleep(_WITNESS_DELAY_S)
        if isinstance(error, ConnectionLost) and error.late:
            _let_the_nearest_speak(ranks, error.peer)
        data = mine.to_json()
        first = _within_time(lambda: ranks.store.compare_set(_KEY, "", data).decode(), data)
        if first != data:
            other = Failure.from_json(first)
            own = not told and bool(mine.packed) and other.headline == mine.headline
            return None if own else other
    return mine if told else None


def _let_the_nearest_speak(ranks: Ranks, peer: str | None) -> None:
    """When one rank stops, those who wait for it and those who wait for them give up together.

    Each says that it is here; who has waited for one of these does not know the cause.
    """

    def wait_if_it_lives() -> None:
        ranks.store.set(f"here: {ranks.coordinates}", "")
        time.sleep(_LATE_DELAY_S)
        if peer is None or ranks.store.check([f"here: {peer}"]):
            time.sleep(_WITNESS_DELAY_S)

    _within_time(wait_if_it_lives, None, _LATE_DELAY_S + _STORE_S)


def read_fault(ranks: Ranks) -> Failure:
    """What the rank that failed first has reported."""
    return _read(ranks.store, "another rank has failed")


def _read(store: Store, otherwise: str) -> Failure:
    unknown = Failure(otherwise)
    return _within_time(lambda: Failure.from_json(store.get(_KEY).decode()), unknown)


def _within_time(ask: Callable[[], T], otherwise: T, limit_s: float = _STORE_S) -> T:
    """Ask the store. A client of one whose process has stopped would wait for ever."""
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = BackgroundThread(run, "hybrid-asks", awaited=True)
    with suppress(MemoryError):  # there is no answer then
        thread.start()
        thread.join(limit_s)
    return answers[0] if answers else otherwise


class Watch:
    """Ends a process that is busy with the user's code while the run has failed elsewhere.

    A rank that talks to others hears of it there. One that loads data or draws figures for an
    hour would be an orphan for as long.

    Args:
        rank: how to name this rank.
        store: of the run.
    """

    def __init__(self, rank: str, store: Store) -> None:
        self._rank, self._store = rank, store
        self._serves = False
        self._over = Event()
        self._thread = BackgroundThread(self._run, "hybrid-watch")
        self._thread.start()

    def serve(self) -> None:
        """What becomes of the run, a worker hears from its driver, however long that may take.

        It is alone only when rank 0, and with it the store, is gone: that ends last. Its driver may
        then be gone, too, and not every wait of a worker hears of it.
        """
        self._serves = True

    def close(self) -> None:
        """Stop the watch: this rank ends by itself, or was told by others."""
        self._over.set()
        self._thread.join(_STORE_S)  # longer only where the store does not answer

    def _run(self) -> None:
        cause = None
        while cause is None:
            if self._over.wait(_LOOK_EVERY_S):
                return
            cause = self._failed()
        if self._over.wait(GRACE_S):
            return
        print(
            f"{self._rank} is killed: it did not end within {GRACE_S:.0f} s of a failure "
            f"elsewhere: {raised(cause.text)}",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)

    def _failed(self) -> Failure | None:
        """What has failed elsewhere: what a rank has recorded, or the host of the store itself."""
        for _ in range(_TRIES):
            try:
                failed = self._store.check([_KEY]) and not self._serves
                return _read(self._store, "unknown") if failed else None
            except RuntimeError:  # the connection is broken, or its other end is gone
                if _answers(self._store):
                    with suppress(RuntimeError):
                        broken: Any = self._store  # torch's types do not know of `clone`
                        self._store = broken.clone()
                        continue
                if self._over.wait(_LOOK_EVERY_S):
                    return None
        return Failure("rank 0, the host of the store, is gone")


def _answers(store: Store) -> bool:
    """Whether the host of a store takes connections. A client tries for minutes, with noise."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return True
    try:
        with create_connection((store.host, store.port), timeout=_LOOK_EVERY_S):
            return True
    except OSError:
        return False


def say_at_next_meeting(ranks: Ranks) -> None:
    """Let this rank, which has failed, take part in the next :func:`meet` of all ranks as failed.

    Those that wait there already hear of it so. A rank that comes to it when this process has ended
    finds it gone.
    """
    fail_next_meeting(ranks.world, _MEETING)
    time.sleep(_READING_S)  # this rank may host the store that they read now


def is_loss(error: BaseException) -> bool:
    """Whether ``error`` only says that a peer is gone (from us, or from gloo under Lightning)."""
    return isinstance(error, ConnectionLost) or is_gone(error) or is_late(error)


def is_unnamed_loss(error: BaseException) -> bool:
    """Whether somebody is gone and this rank cannot tell who: a direct neighbour can."""
    named = isinstance(error, ConnectionLost) and error.peer is not None
    return is_loss(error) and not named
