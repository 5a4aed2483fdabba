"""Defer the handlers of signals while ranks exchange messages.

Python runs the handler of a signal between any two bytecodes of the main thread. A
``KeyboardInterrupt``, or a checkpoint that SLURM's signal asks for, in the middle of a pass through
the stages would leave messages on the links that nobody receives, and the ranks out of step. So
functions that exchange messages are marked with :func:`signals_deferred`: a handler waits until the
outermost of these functions has returned.

With several replicas a signal reaches their drivers at different moments. A handler must not wait
for other drivers, which possibly wait for this one. And the driver of replica 0, which writes the
checkpoint, must run its handler first: the other drivers *hold* signals until they have averaged
gradients with it (:func:`run_pending`).
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
SignalHandler = Callable[[int, FrameType | None], Any]
Surrounding = Callable[[], AbstractContextManager[Any]]

_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")  # not every system has all
NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class _WaitingSignals:
    """Which functions of :func:`signals_deferred` the main thread is in, and the signals that wait.

    Attributes:
        depth: number of these functions that the main thread has entered and not left.
        held: whether signals wait outside of these functions too, until :func:`run_pending`.
        pending: handler, number of the signal and frame of each signal that waits, in order.
    """

    depth = 0
    held = False
    pending: list["tuple[DeferrableHandler, int, FrameType | None]"] = []  # noqa: RUF012  one list


class DeferrableHandler:
    """A handler of a signal that waits if signals are deferred or held when its signal comes.

    Args:
        handler: the handler that was set before, which this one runs.
        surrounding: called for each run of the handler; returns a context in which it runs.
    """

    def __init__(self, handler: SignalHandler, surrounding: Surrounding) -> None:
        self.handler = handler
        self._surrounding = surrounding

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _WaitingSignals.depth or _WaitingSignals.held:
            _WaitingSignals.pending.append((self, number, frame))
        else:
            self.run(number, frame)

    def run(self, number: int, frame: FrameType | None) -> None:
        """Run the handler now, in its surrounding context, whether or not signals are deferred.

        Args:
            number: number of the signal.
            frame: frame of the main thread in which the signal has come.
        """
        with self._surrounding():
            self.handler(number, frame)


def make_deferrable(surrounding: Surrounding = nullcontext) -> None:
    """Wrap this process's handlers of signals in :class:`DeferrableHandler`.

    Only handlers that are Python functions, for the signals in `NUMBERS`. Called at the start of a
    run. Does nothing outside of the main thread.

    Args:
        surrounding: called for each run of a handler; returns a context in which it runs.
    """
    if not _in_main_thread():
        return
    for number in NUMBERS:
        handler = signal.getsignal(number)
        # SIG_DFL and SIG_IGN, which are not callable, run no Python and so send no messages
        if callable(handler) and not isinstance(handler, DeferrableHandler):
            signal.signal(number, DeferrableHandler(handler, surrounding))


def restore_handlers() -> None:
    """Undo :func:`make_deferrable`: run handlers of waiting signals, and unwrap all handlers."""
    if not _in_main_thread():
        return
    run_pending(hold=False)
    for number in NUMBERS:
        handler = signal.getsignal(number)
        # another handler was set by the user meanwhile, and stays
        if isinstance(handler, DeferrableHandler):
            signal.signal(number, handler.handler)


def run_pending(*, hold: bool) -> None:
    """Run the handlers of the signals that wait, and hold later signals or not.

    Inside of a function of :func:`signals_deferred` these handlers still wait for its end. Does
    nothing outside of the main thread.

    Args:
        hold: whether signals that come from now on wait for the next call of this function.
    """
    if _in_main_thread():
        _WaitingSignals.held = hold
        _run_pending()


def signals_deferred(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that exchanges messages: signal handlers wait until it has returned.

    If such functions call each other, handlers wait for the outermost one.
    """

    @wraps(function)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not _in_main_thread():  # handlers run in the main thread only
            return function(*arguments, **keywords)
        # calls nest, and messages are being exchanged until the outermost one returns
        _WaitingSignals.depth += 1
        try:
            return function(*arguments, **keywords)
        finally:
            _WaitingSignals.depth -= 1
            if not _WaitingSignals.held:
                _run_pending()

    return wrapper


def _run_pending() -> None:
    if not _WaitingSignals.depth and _WaitingSignals.pending:
        pending, _WaitingSignals.pending = _WaitingSignals.pending, []
        for handler, number, frame in pending:
            handler.run(number, frame)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Context in which this process ignores the signals in `NUMBERS`; for workers.

    The driver decides how a run ends. Handlers are set back at the end.
    """
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
