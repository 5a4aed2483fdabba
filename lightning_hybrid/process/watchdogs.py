"""Threads that end this process if it goes on after a failure elsewhere.

`FaultWatchdog` ends it if another rank has failed, and `HostWatch` ends a server if the process of
rank 0, which hosts the store, no longer answers. What is written to the store: ``first_fault.py``.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any, cast

from torch.distributed import Store

from lightning_hybrid.comm import (
    FAULT,
    BackgroundThread,
    ConnectionLost,
    Coordinates,
    Failure,
    end_process,
    raised,
)
from lightning_hybrid.process.first_fault import LATE_DELAY_S, STORE_S, answers, ask, read_fault

GRACE_S = 8.0
"""How long, in seconds, ranks of a failed run may take to report and end before they are killed."""

_LOOK_EVERY_S = 1.0
_TRIES = 3


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
        self._thread.join(STORE_S)  # with a limit, since the thread may wait for the store

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
            if answers(self._store):
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
            if silent and not self._over.wait(LATE_DELAY_S) and not self._answers_within(STORE_S):
                end_process(f"{self._name} ends: rank 0 has stopped answering")

    def _answers_within(self, limit_s: float) -> bool:
        return ask(self._store, lambda: self._store.check([FAULT]) or True, False, limit_s)


def _sign(rank: int) -> str:
    return f"signs of life of rank {rank}"
