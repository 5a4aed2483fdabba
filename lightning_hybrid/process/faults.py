"""The first error of a run, kept in the store of all ranks; threads that watch the store.

The first rank to fail writes its error to the store, where the others find it (`first_fault`). Two
kinds of threads end a process: `FaultWatchdog`, if the process goes on after a failure elsewhere,
and `HostWatch`, if the process of rank 0, which hosts the store, no longer answers.

What is elsewhere: which error a rank then raises, and what it prints, is decided in
``strategy/launcher.py`` (``_raise_first``). That a started process was killed is noticed in
``killed_ranks.py``.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from errno import EMFILE, ENFILE
from socket import create_connection
from threading import Event
from typing import Any, Protocol, TypeVar, cast

from torch.distributed import PrefixStore, Store, TCPStore

from lightning_hybrid.comm import (
    FAULT,
    BackgroundThread,
    ConnectionLost,
    Coordinates,
    Failure,
    Group,
    end_process,
    fail_next_meeting,
    is_gone,
    is_late,
    raised,
    told_text,
)

GRACE_S = 8.0
"""How long, in seconds, ranks of a failed run may take to report and end before they are killed."""

_LOOK_EVERY_S = 1.0
_WITNESS_DELAY_S, _LATE_DELAY_S = 1.0, 2.0
_MEETING, _READING_S = timedelta(seconds=2), 0.2
_STORE_S = 3.0  # how long to wait for the store, whose host may be dead or stopped
_TRIES = 3

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
            if not _answers(ranks.store):
                return lost_ranks(ranks.coordinates, [0])
        late = isinstance(error, ConnectionLost) and error.late
        if late and not _let_the_nearest_speak(ranks, getattr(error, "peer", None)):
            return None  # the store's host has stopped
        data = mine.to_json()
        first = _ask(ranks.store, lambda: ranks.store.compare_set(FAULT, "", data).decode(), data)
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
        time.sleep(_LATE_DELAY_S)
        if peer is None or ranks.store.check([f"here: {peer}"]):
            time.sleep(_WITNESS_DELAY_S)
        return True

    return _ask(ranks.store, wait_if_it_lives, False, _LATE_DELAY_S + _STORE_S)


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
    _ask(everyone.store, lambda: everyone.store.compare_set(FAULT, "", data), None)


def read_fault(store: Store) -> Failure:
    """Read from the store the failure of the first rank to fail.

    If the store does not answer, a failure without details is returned.
    """
    unknown = Failure("another rank has failed")
    return _ask(store, lambda: Failure.from_json(store.get(FAULT).decode()), unknown)


def _ask(store: Store, ask: Callable[[], T], otherwise: T, limit_s: float = _STORE_S) -> T:
    """Call a function that asks the store, and return its answer; do not wait for it without limit.

    The function runs in a thread: if the process that hosts the store has stopped, it would wait
    for ever. If that process has ended, the function is not called, since torch would print its
    stack.

    Args:
        store: the store, or a part of it under a prefix.
        ask: the function; it may send several requests to the store.
        otherwise: what to return if there is no answer in time, or the store is gone.
        limit_s: how many seconds to wait.
    """
    answers: list[T] = []

    def run() -> None:
        with suppress(RuntimeError):
            if _answers(store):
                answers.append(ask())

    thread = BackgroundThread(run, "hybrid-asks", awaited=True)
    with suppress(MemoryError):  # no memory for a thread: there is no answer
        thread.start()
        thread.join(limit_s)
    return answers[0] if answers else otherwise


class FaultWatchdog:
    """A thread that kills this process if it does not end soon after another rank has failed.

    A rank that exchanges messages learns of a failure by them. But a rank may run the user's code
    for an hour, such as loading data, or wait for the failed rank in the constructor of a process
    group: without this thread it would go on. The thread also shows the other ranks that this
    process has not stopped (by SIGSTOP, for example).

    Args:
        here: coordinates of this rank.
        store: store of the run. The thread makes a connection of its own, since requests of the
            rank's other threads may occupy theirs.
        timeout: how long a rank may show no sign of life while this one waits for it.
    """

    def __init__(self, here: Coordinates, store: Store, timeout: timedelta) -> None:
        # torch's type stubs lack `clone`
        self._here = here
        self._store = cast(Any, store)
        self._timeout_s = timeout.total_seconds()
        self._own: Any = None
        self._serves = False
        self._over = Event()
        self._heard_s = dict[int, float]()  # when each rank that this one waits for has told so
        self._signs = dict[int, bytes]()
        self._waits = False
        self._thread = BackgroundThread(self._run, "hybrid-watch")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def serve(self) -> None:
        """On a worker: ignore failures in the store from now on, since its driver tells it of them.

        The process is still killed if rank 0, which hosts the store, is gone. Rank 0 ends last, so
        the driver may be gone too, and a waiting worker does not always notice that.
        """
        self._serves = True

    def close(self) -> None:
        """End the thread, when this rank ends by itself, or has been told of the failure."""
        self._over.set()
        self._thread.join(_STORE_S)  # with a limit, since the thread may wait for the store

    def wait_for(self, names: Mapping[int, str], place: str) -> Callable[[], None]:
        """Begin to look for signs of life of other ranks, for which this rank is about to wait.

        Args:
            names: names of these ranks for messages, by global rank.
            place: what they are to reach, such as a barrier, for the error.

        Returns:
            A function to call again and again during the wait. It raises a ConnectionLost when one
            of these ranks has shown no sign of life for the time-out.
        """
        # (rank 0, the first one, hosts the store: if that does not answer, all are silent)
        self._heard_s = dict.fromkeys(names, time.monotonic())

        def look() -> None:
            self._waits = True
            heard_s, rank = min((heard_s, rank) for rank, heard_s in self._heard_s.items())
            if time.monotonic() - heard_s > self._timeout_s:
                raise ConnectionLost(
                    f"Lost {names[rank]}. It has stopped answering, or its script comes to {place} "
                    "later than the time-out, which the strategy's timeout=... sets",
                    names[rank],
                    late=True,
                )

        return look

    def _run(self) -> None:
        while (cause := self._failed()) is None:
            if self._over.wait(_LOOK_EVERY_S):
                return
        if self._over.wait(GRACE_S):
            return
        end_process(
            f"{self._here} is killed: it did not end within {GRACE_S:.0f} s of a failure "
            f"elsewhere: {raised(cause.text)}"
        )

    def _failed(self) -> Failure | None:
        """Look for a failure in the store, or the loss of its host; ``None``: neither.

        Also exchanges signs of life with the other ranks.
        """
        for _ in range(_TRIES):
            if _answers(self._store):
                with suppress(RuntimeError):  # the connection is broken
                    self._own = self._own or self._store.clone()
                    self._exchange_signs(self._own)
                    failed = self._own.check([FAULT]) and not self._serves
                    return read_fault(self._own) if failed else None
                self._own = None
                return None  # the next look has another one
            if self._over.wait(_LOOK_EVERY_S):
                return None
        return Failure("rank 0, the host of the store, is gone")

    def _exchange_signs(self, store: Store) -> None:
        """Write a sign of life of this rank, and read those of the ranks that it waits for."""
        store.add(_sign(self._here.rank), 1)
        heard_s, keys = self._heard_s, [_sign(rank) for rank in self._heard_s]
        if self._waits and store.check(keys):
            self._waits = False
            for rank, sign in zip(heard_s, store.multi_get(keys)):
                if sign != self._signs.get(rank):
                    self._signs[rank], heard_s[rank] = sign, time.monotonic()


class HostWatch:
    """A thread that ends the process of a server when rank 0 has stopped answering.

    A server waits for orders of rank 0 without a limit, since a script may do other things between
    its runs; but the store in the process of rank 0 answers at any time. (If that process ends, the
    wait for an order ends too.)

    Args:
        name: name of this server in messages.
        store: the store, which rank 0 hosts.
        timeout: how long the store may not answer.

    Attributes:
        timeout: may be set to another value at any time.
    """

    def __init__(self, name: str, store: Store, timeout: timedelta) -> None:
        self.timeout = timeout
        self._name, self._store = name, cast(Any, store).clone()
        self._over = Event()
        BackgroundThread(self._run, "hybrid-host").start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            silent = not self._answers_within(self.timeout.total_seconds())
            # (once more, as time has passed in which this process has been stopped itself)
            if silent and not self._over.wait(_LATE_DELAY_S) and not self._answers_within(_STORE_S):
                end_process(f"{self._name} ends: rank 0 has stopped answering")

    def _answers_within(self, limit_s: float) -> bool:
        return _ask(self._store, lambda: self._store.check([FAULT]) or True, False, limit_s)


def _sign(rank: int) -> str:
    return f"signs of life of rank {rank}"


def _answers(store: Store) -> bool:
    """Whether the host of a store accepts connections; ``True`` for stores that need none.

    It is tried with a plain socket: a client of the store would try for minutes, and print
    warnings.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return True
    try:
        with create_connection((store.host, store.port), timeout=_LOOK_EVERY_S):
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
