"""Says what is being done before the first step, if it takes longer than a few seconds.

Capturing a network, trying whether its batches may be split and measuring its partitions happen
inside the first training step, where Lightning's progress bar stands still. After 3 s one more bar
appears beside it, of the kind that the Trainer uses; where there is no terminal, one line is
printed. ``Trainer(enable_progress_bar=False)`` switches both off.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from lightning_hybrid._lightning import ProgressBar, RichProgressBar, Tqdm, TQDMProgressBar, Trainer
from lightning_hybrid.comm import BackgroundThread

PATIENCE_S = 3.0
"""Seconds for which nothing is said."""
_LOOKS_EVERY_S = 0.5


class Display(Protocol):
    """Shows what is being done."""

    def show(self, what: str, done: int, total: int | None) -> None:
        """Show it.

        Args:
            what: the work, in words, with all numbers that belong to it.
            done: how much of it is done.
            total: how much there is to do; ``None``: that is not known.
        """

    def close(self) -> None:
        """Show nothing any more."""


class StartProgress:
    """What is being done before a network's first step, shown from the third second on.

    A thread looks at the clock, since what takes long (a capture) does not come by here. It lives
    between `begin` and `over`.

    Args:
        open_display: makes a display when there is something to show, or has none at the moment;
            ``None``: nothing is ever shown.
        clock: seconds.
    """

    def __init__(
        self,
        open_display: Callable[[], Display | None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._clock = open_display, clock
        self._display: Display | None = None
        self._state: tuple[str, int, int | None] | None = None
        self._began = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, what: str) -> None:
        """The first of several pieces of work begins; from here on time counts."""
        if self._open is None:
            return
        self._began = self._clock()
        self._end.clear()
        # a thread, since a capture comes back to nobody until it is done
        self._thread = BackgroundThread(self._watch, "start progress")
        self._thread.start()
        self.doing(what)

    def doing(self, what: str, done: int = 0, total: int | None = None) -> None:
        """What is being done now; between `begin` and `over`, else nothing happens.

        Args:
            what: the work, in words, with all numbers that belong to it.
            done: how much of it is done.
            total: how much there is to do; ``None``: that is not known.
        """
        if self._thread is not None:
            with self._lock:
                self._state = what, done, total
                self._look()

    def of_profiling(self, name: str) -> Callable[[int, int], None]:
        """What hears which partition of a network is measured, and how many there are."""

        def advance(number: int, count: int) -> None:
            what = f"profiling {number} of {count} partitions of {name or 'self'!r}"
            self.doing(what, number, count)

        return advance

    def over(self) -> None:
        """All is done, or has failed."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._end.set()
        # a display that it opened after this would never be closed
        thread.join()
        if self._display is not None:
            self._display.close()
        self._display = self._state = None

    def _watch(self) -> None:
        while not self._end.wait(_LOOKS_EVERY_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        if self._open is None or self._state is None or self._clock() - self._began < PATIENCE_S:
            return
        if self._display is None:
            self._display = self._open()
        if self._display is not None:
            self._display.show(*self._state)


# ---------------------------------------------------------------- displays


def display_of(trainer: Trainer, say: Callable[[str], None]) -> Callable[[], Display | None] | None:
    """Opens displays beside the progress bar of a Trainer; ``None``: it has none.

    Args:
        trainer: of the run, on global rank 0.
        say: prints a line.
    """
    bar = trainer.progress_bar_callback
    return None if bar is None else lambda: _display(bar, say)


def _display(bar: ProgressBar, say: Callable[[str], None]) -> Display | None:
    # the Tuner switches the bar off for a while; one of the user's own cannot say whether it is
    if getattr(bar, "is_disabled", False):
        return None
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        if bar.progress.console.is_terminal:
            return _RichTask(bar.progress)
    elif isinstance(bar, TQDMProgressBar) and sys.stdout.isatty():
        return _TqdmBar()
    return Line(say)


class _RichTask:
    """A task of the bars that Lightning shows already: a terminal has room for one display."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None

    def show(self, what: str, done: int, total: int | None) -> None:
        most = float("inf") if total is None else total
        if self._task is None:
            self._task = self._bars.add_task(what, total=most, completed=done)
        self._bars.update(self._task, description=what, total=most, completed=done)
        self._bars.refresh()

    def close(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.refresh()


class _TqdmBar:
    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = Tqdm(leave=False, file=sys.stdout, dynamic_ncols=True)
        self._bar.total, self._bar.n = total, done
        self._bar.set_description(what)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Line:
    """One line, once: a file keeps all that is written to it.

    Args:
        say: prints it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def show(self, what: str, done: int, total: int | None) -> None:
        """Show it, if nothing was shown."""
        if self._say is not None:
            self._say(f"Before the first step: {what} ...")
            self._say = None

    def close(self) -> None:
        """Do nothing: a line that was written stays."""
