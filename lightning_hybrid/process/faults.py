"""Find the first error of a run on every rank, through the store: the first to fail writes it."""

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
    """What one rank needs to speak to all others, whether or not sizes are known yet."""

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
    """Write a failure of this rank to the store, unless another rank has failed before.

    Args:
        ranks: all ranks; ``None`` before they have met.
        error: what this rank has raised.
        where: name of this rank.

    Returns:
        The failure of another rank that came first, or that ``error`` stands for; ``None``: this
        one is the first, or is equal to the first one.
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
    """After a time-out, wait so that a rank that has waited for the stopped one reports first.

    When one rank stops, those that wait for it and those that wait for these time out together.
    Each writes to the store that it lives; one whose ``peer`` has done so does not know the cause,
    and waits for longer. Returns whether the store answers.
    """

    def wait_if_it_lives() -> bool:
        ranks.store.set(f"here: {ranks.coordinates}", "")
        time.sleep(_LATE_DELAY_S)
        if peer is None or ranks.store.check([f"here: {peer}"]):
            time.sleep(_WITNESS_DELAY_S)
        return True

    return _ask(ranks.store, wait_if_it_lives, False, _LATE_DELAY_S + _STORE_S)


def lost_ranks(here: Coordinates, ranks: Iterable[int]) -> Failure:
    """The failure to report for ranks whose processes have ended without a word of theirs."""
    names = " and ".join(str(replace(here, rank=rank)) for rank in ranks)
    return Failure(f"Lost {names}. It was killed, or its process ended without a word")


def tell_lost(everyone: ConnectedRank, ranks: Iterable[int]) -> None:
    """Write to the store that ranks are lost, unless it has a failure: that is why they ended."""
    data = lost_ranks(everyone.coordinates, ranks).to_json()
    _ask(everyone.store, lambda: everyone.store.compare_set(FAULT, "", data), None)


def read_fault(store: Store) -> Failure:
    """Read the failure that the first rank to fail has written to the store."""
    unknown = Failure("another rank has failed")
    return _ask(store, lambda: Failure.from_json(store.get(FAULT).decode()), unknown)


def _ask(store: Store, ask: Callable[[], T], otherwise: T, limit_s: float = _STORE_S) -> T:
    """Call ``ask``, a request to the store, in a thread; ``otherwise`` if it takes too long.

    If the process of the store has stopped, a request would wait for ever; if it has ended, torch
    would print its stack.
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
    """A thread that kills this process if it does not end soon after the run has failed elsewhere.

    A rank that exchanges messages learns of a failure by them. One that runs the user's code for an
    hour, such as loading data, would go on for as long, and so would one that waits for the failed
    rank inside of a process group's constructor. The thread also tells the others that this process
    lives, which one that has stopped (SIGSTOP) does not.

    Args:
        here: coordinates of this rank.
        store: store of the run; the thread has a connection of its own, since a request of this
            rank may wait on that of the others.
        timeout: how long this rank waits for one that has stopped.
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
        """Begin to watch."""
        self._thread.start()

    def serve(self) -> None:
        """Ignore recorded failures from here on: this rank is a worker, whose driver reports them.

        It is still killed if the host of the store, rank 0, is gone: that ends last, so the driver
        may be gone too, and not every wait of a worker notices that.
        """
        self._serves = True

    def close(self) -> None:
        """End the thread: this rank ends by itself, or others have told it of the failure."""
        self._over.set()
        self._thread.join(_STORE_S)  # with a limit, since the thread may wait for the store

    def wait_for(self, names: Mapping[int, str], place: str) -> Callable[[], None]:
        """This rank begins to wait for others.

        Args:
            names: names of all ranks that are to come, by their numbers.
            place: where they are to come, for the error.

        Returns:
            A function to call while it waits. It raises a ConnectionLost when one of them has shown
            no sign of life for the time-out.
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
        """The failure that a rank has recorded, or the loss of the store's host; else ``None``."""
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
        """Show that this rank lives, and look at those that it waits for."""
        store.add(_sign(self._here.rank), 1)
        heard_s, keys = self._heard_s, [_sign(rank) for rank in self._heard_s]
        if self._waits and store.check(keys):
            self._waits = False
            for rank, sign in zip(heard_s, store.multi_get(keys)):
                if sign != self._signs.get(rank):
                    self._signs[rank], heard_s[rank] = sign, time.monotonic()


class HostWatch:
    """A thread that ends a server when rank 0, which gives it orders, has stopped answering.

    A server waits for orders without a limit, since a script may rest, but the store of rank 0
    answers all the time. (If its process ends, the wait does, too.)

    Args:
        name: of this server.
        store: of rank 0.
        timeout: how long rank 0 may be silent.

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
    """Whether the host of a store accepts connections.

    Tried by a plain socket: a client of the store would try for minutes, and print warnings.
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
    """Take part in the next :func:`meet` of a group as a failed rank, and wait a moment for them.

    Ranks that wait there learn of the failure. One that comes when this process has ended finds the
    connection closed.
    """
    fail_next_meeting(group, _MEETING)
    time.sleep(_READING_S)  # stay a moment: this rank may host the store that they read now


def is_loss(error: BaseException) -> bool:
    """Whether ``error``, ours or one of gloo's or NCCL's, only says that a peer is lost."""
    return isinstance(error, ConnectionLost) or is_gone(error) or is_late(error)


def is_unnamed_loss(error: BaseException) -> bool:
    """Whether ``error`` says that a peer is lost, but not which one."""
    named = isinstance(error, ConnectionLost) and error.peer is not None
    return is_loss(error) and not named
