"""The first error of a run, kept in the store of all ranks.

The first rank to fail writes its error to the store, where the others find it (`first_fault`).

What is elsewhere: which error a rank then raises, and what it prints, is decided in
``strategy/launcher.py`` (``_raise_first``). ``watchdogs.py`` ends processes that go on after a
failure. That a started process was killed is noticed in ``killed_ranks.py``.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from errno import EMFILE, ENFILE
from socket import create_connection
from typing import Protocol, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_hybrid.comm import (
    FAULT,
    BackgroundThread,
    ConnectionLost,
    Coordinates,
    Failure,
    Group,
    fail_next_meeting,
    is_gone,
    is_late,
    told_text,
)

STORE_S = 3.0
"""How long, in seconds, to wait for an answer of the store, whose host may be dead or stopped."""
LATE_DELAY_S = 2.0
"""How long, in seconds, a rank waits after a time-out for others to write to the store."""

_WITNESS_DELAY_S, _CONNECT_S = 1.0, 1.0
_MEETING, _READING_S = timedelta(seconds=2), 0.2

T = TypeVar("T")


class ConnectedRank(Protocol):
    """A rank with its means to reach all others: an `Everyone`, or the `Mesh` it has joined."""

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank."""

    @property
    def store(self) -> Store:
        """The store that all ranks share."""

    @property
    def world(self) -> Group:
        """The group of all ranks."""


def first_fault(ranks: ConnectedRank | None, error: BaseException, where: str) -> Failure | None:
    """Record an error of this rank in the store, unless another rank has recorded one before.

    Called when this rank fails. May wait some seconds, so that a rank that knows the cause of a
    lost connection records first.

    Args:
        ranks: this rank with its store; ``None``: ranks have not met, and nothing is recorded.
        error: what this rank has raised.
        where: name of this rank in messages.

    Returns:
        The failure to report instead of ``error``: that of the rank that failed first, or that has
        sent ``error`` to this rank; or the loss of rank 0, if the store does not answer. ``None``:
        report ``error`` itself.
    """
    told, mine = told_text(error) is not None, Failure.of(error, where)
    if is_loss(error):  # a lost connection is of no use as an exception on other ranks
        mine = replace(mine, packed="")
    if ranks is not None:
        unnamed = not told and is_unnamed_loss(error)
        if unnamed:
            time.sleep(_WITNESS_DELAY_S)
            if not answers(ranks.store):
                return lost_ranks(ranks.coordinates, [0])
        late = isinstance(error, ConnectionLost) and error.late
        if late and not _let_the_nearest_speak(ranks, getattr(error, "peer", None)):
            return None  # the store's host has stopped
        data = mine.to_json()
        first = ask(ranks.store, lambda: ranks.store.compare_set(FAULT, "", data).decode(), data)
        if first != data:
            other = Failure.from_json(first)
            own = not told and bool(mine.packed) and other.headline == mine.headline
            return None if own else other
    return mine if told else None


def _let_the_nearest_speak(ranks: ConnectedRank, peer: str | None) -> bool:
    """After a time-out, wait so that a rank that was waiting for the stopped rank reports first.

    When a rank stops, the ranks that wait for it time out, and at the same time the ranks that wait
    for those. Each of them writes to the store that it lives. If its ``peer`` has written so too,
    this rank has not waited for the stopped one, and so waits longer before it reports.

    Args:
        ranks: this rank with its store.
        peer: name of the rank that this one has waited for; ``None``: not known.

    Returns:
        Whether the store answers.
    """

    def wait_if_it_lives() -> bool:
        ranks.store.set(f"here: {ranks.coordinates}", "")
        time.sleep(LATE_DELAY_S)
        if peer is None or ranks.store.check([f"here: {peer}"]):
            time.sleep(_WITNESS_DELAY_S)
        return True

    return ask(ranks.store, wait_if_it_lives, False, LATE_DELAY_S + STORE_S)


def lost_ranks(here: Coordinates, ranks: Iterable[int]) -> Failure:
    """Make the failure to report for ranks whose processes have ended without reporting an error.

    Args:
        here: coordinates of this rank, in whose mesh the lost ranks are.
        ranks: global ranks of the lost processes.
    """
    names = " and ".join(str(replace(here, rank=rank)) for rank in ranks)
    return Failure(f"Lost {names}. It was killed, or its process ended without a word")


def tell_lost(everyone: ConnectedRank, ranks: Iterable[int]) -> None:
    """Record in the store that ranks are lost.

    If a failure is recorded already, it stays: the ranks ended because of it.

    Called on a rank that has started these processes.

    Args:
        everyone: this rank with its store.
        ranks: global ranks of the lost processes.
    """
    data = lost_ranks(everyone.coordinates, ranks).to_json()
    ask(everyone.store, lambda: everyone.store.compare_set(FAULT, "", data), None)


def read_fault(store: Store) -> Failure:
    """Read from the store the failure of the first rank to fail.

    If the store does not answer, a failure without details is returned.
    """
    unknown = Failure("another rank has failed")
    return ask(store, lambda: Failure.from_json(store.get(FAULT).decode()), unknown)


def ask(store: Store, question: Callable[[], T], otherwise: T, limit_s: float = STORE_S) -> T:
    """Call a function that asks the store, and return its answer; do not wait for it without limit.

    The function runs in a thread: if the process that hosts the store has stopped, it would wait
    for ever. If that process has ended, the function is not called, since torch would print its
    stack.

    Args:
        store: the store, or a part of it under a prefix.
        question: the function; it may send several requests to the store.
        otherwise: what to return if there is no answer in time, or the store is gone.
        limit_s: how many seconds to wait.
    """
    found: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            if answers(store):
                found.append(question())

    thread = BackgroundThread(run, "hybrid-asks", awaited=True)
    with suppress(MemoryError):  # no memory for a thread: there is no answer
        thread.start()
        thread.join(limit_s)
    return found[0] if found else otherwise


def answers(store: Store) -> bool:
    """Whether the host of a store accepts connections; ``True`` for stores that need none.

    It is tried with a plain socket: a client of the store would try for minutes, and print
    warnings.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return True
    try:
        with create_connection((store.host, store.port), timeout=_CONNECT_S):
            return True
    except OSError as error:
        return error.errno in (EMFILE, ENFILE)  # this process has no socket to try by


def say_at_next_meeting(group: Group) -> None:
    """Tell the ranks that come to the next ``comm.meet`` of a group that this rank has failed.

    Takes part in that meeting without waiting for all, and stays for a moment so that they can read
    the failure in the store. A rank that comes later finds the connection closed.
    """
    fail_next_meeting(group, _MEETING)
    time.sleep(_READING_S)  # stay a moment: this rank may host the store that they read now


def is_loss(error: BaseException) -> bool:
    """Whether an error only says that another rank is lost, and so is not the cause of a failure.

    It may be a `ConnectionLost`, or an error of gloo or NCCL.
    """
    return isinstance(error, ConnectionLost) or is_gone(error) or is_late(error)


def is_unnamed_loss(error: BaseException) -> bool:
    """Whether an error says that another rank is lost, but not which one."""
    named = isinstance(error, ConnectionLost) and error.peer is not None
    return is_loss(error) and not named
