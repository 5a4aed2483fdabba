"""Show the progress of the work before the first step, if it takes longer than a few seconds.

A network is captured, checked and profiled inside the first training step, where Lightning's
progress bar does not move. After 3 s one more bar appears beside it, of the kind that the Trainer
uses; without a terminal, one line is printed. ``Trainer(enable_progress_bar=False)`` disables both.
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
"""Seconds before anything is shown."""
_LOOKS_EVERY_S = 0.5


class Display(Protocol):
    """Shows the current work: a progress bar or a line."""

    def show(self, what: str, done: int, total: int | None) -> None:
        """Show the current work.

        Args:
            what: description of the work, with all its numbers.
            done: how much of the work is done.
            total: how much work there is; ``None``: not known.
        """

    def close(self) -> None:
        """Remove what is shown."""


class StartProgress:
    """Shows the work before the first step of a network, if it takes longer than `PATIENCE_S`.

    A thread, from `begin` to `over`, watches the time, since some work (a capture) takes long
    without calling any method of this class.

    Args:
        open_display: makes a display, or returns ``None`` if there can be none now; ``None``:
            nothing is ever shown.
        clock: returns the time in seconds.
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
        """Begin the first piece of work, and start the clock."""
        if self._open is None:
            return
        self._began = self._clock()
        self._end.clear()
        self._thread = BackgroundThread(self._watch, "start progress")
        self._thread.start()
        self.doing(what)

    def doing(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Set the current work; ignored outside of `begin` and `over`.

        Args:
            what: description of the work, with all its numbers.
            done: how much of the work is done.
            total: how much work there is; ``None``: not known.
        """
        if self._thread is not None:
            with self._lock:
                self._state = what, done, total
                self._look()

    def of_profiling(self, name: str) -> Callable[[int, int], None]:
        """Make the callback for profiling a network, which gets number and count of partitions."""

        def advance(number: int, count: int) -> None:
            what = f"profiling {number} of {count} partitions of {name or 'self'!r}"
            self.doing(what, number, count)

        return advance

    def over(self) -> None:
        """End: all work is done, or has failed."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._end.set()
        # wait for the thread, which might open a display that is never closed
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
    """Make a function that opens displays beside a Trainer's progress bar; ``None``: it has none.

    Args:
        trainer: the Trainer, on global rank 0.
        say: prints a line.
    """
    bar = trainer.progress_bar_callback
    return None if bar is None else lambda: _display(bar, say)


def _display(bar: ProgressBar, say: Callable[[str], None]) -> Display | None:
    # the Tuner disables the bar for a while; a class of the user's may lack the attribute
    if getattr(bar, "is_disabled", False):
        return None
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        if bar.progress.console.is_terminal:
            return _RichTask(bar.progress)
    elif isinstance(bar, TQDMProgressBar) and sys.stdout.isatty():
        return _TqdmBar()
    return Line(say)


class _RichTask:
    """A task added to Lightning's Rich display, since a terminal can have one such display only."""

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
    """A further tqdm bar."""

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
    """Prints a single line for all work, since there is no terminal in which it could be updated.

    Args:
        say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say

    def show(self, what: str, done: int, total: int | None) -> None:
        """Print the line at the first call."""
        if self._say is not None:
            self._say(f"Before the first step: {what} ...")
            self._say = None

    def close(self) -> None:
        """Do nothing: a printed line stays."""
