"""Signals wait while ranks talk to each other.

The handlers of Python run between any two lines of the main thread. A ``KeyboardInterrupt``, or a
checkpoint that SLURM's signal asks for, in the middle of a pass through the stages would leave the
other ranks with half a conversation, which nobody could take up again.

With several replicas a signal reaches their drivers at different moments. So a handler must not
wait for other drivers, which may wait for this one. And the first driver, which saves, is to leave
first: the others *hold* signals until they have averaged the gradients of their step with it.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[int, FrameType | None], Any]
Alone = Callable[[], AbstractContextManager[Any]]

_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")  # not every system has all
NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _Conversation:
    """How deep the main thread is in it, and the signals that have come meanwhile."""

    depth = 0
    held = False
    waiting: list["tuple[Patient, int, FrameType | None]"] = []  # noqa: RUF012  one per process


class Patient:
    """A handler that waits for the end of a conversation.

    Args:
        handler: what it stands before.
        alone: entered while it runs.
    """

    def __init__(self, handler: Handler, alone: Alone) -> None:
        self.handler, self._alone = handler, alone

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _Conversation.depth or _Conversation.held:
            _Conversation.waiting.append((self, number, frame))
        else:
            self.hear(number, frame)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Let the handler run."""
        with self._alone():
            self.handler(number, frame)


def make_patient(alone: Alone = nullcontext) -> None:
    """Put a :class:`Patient` before every handler that runs Python.

    Args:
        alone: makes what is entered while a handler runs.
    """
    if not _in_main_thread():
        return
    for number in NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, Patient):
            signal.signal(number, Patient(handler, alone))


def make_impatient() -> None:
    """Undo :func:`make_patient`, where nobody has set another handler since."""
    if not _in_main_thread():
        return
    let_in(hold=False)
    for number in NUMBERS:
        handler = signal.getsignal(number)
        if isinstance(handler, Patient):
            signal.signal(number, handler.handler)


def let_in(*, hold: bool) -> None:
    """Hear the signals that have waited.

    Args:
        hold: whether those that come from now on wait for the next call.
    """
    if _in_main_thread():
        _Conversation.held = hold
        _let_them_in()


def conversation(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that talks to other ranks: signals wait until it has returned."""

    @wraps(function)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not _in_main_thread():  # handlers run in the main thread only
            return function(*arguments, **keywords)
        _Conversation.depth += 1
        try:
            return function(*arguments, **keywords)
        finally:
            _Conversation.depth -= 1
            if not _Conversation.held:
                _let_them_in()

    return wrapper


def _let_them_in() -> None:
    if not _Conversation.depth and _Conversation.waiting:
        waiting, _Conversation.waiting = _Conversation.waiting, []
        for patient, number, frame in waiting:
            patient.hear(number, frame)


@contextmanager
def left_to_the_driver() -> Iterator[None]:
    """A worker that dies of a signal takes its driver by surprise: the driver decides."""
    if not _in_main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
