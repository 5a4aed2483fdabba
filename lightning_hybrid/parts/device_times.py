"""Measure how long each device of a replica computes in training, for logs and new plans."""

import time
from collections.abc import Callable, Sequence

from lightning_hybrid.driver import Driver
from lightning_hybrid.run import Part, Run
from lightning_hybrid.worker import BUSY


class StepWatcher(Part):
    """Base class of parts that measure how long devices compute in training.

    A subclass may set ``_window``; it is then paused during validations.

    Args:
        run: the run, which is about to begin.
    """

    _window: "Window | None" = None

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trainer = run.trainer

    def begin(self, driver: Driver) -> None:
        self._driver = driver
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was measured; called when a run begins, and when stages are cut anew."""

    def busy_s(self) -> Sequence[float]:
        """Return the seconds that each device of this replica has computed since the run began.

        The order is that of ``pp_rank`` 1, 2, ... (workers), then 0 (the driver). Workers answer
        when they have carried out earlier commands.
        """
        watch = self._run.stopwatch
        return [] if watch is None else [*self._driver.reports(BUSY), watch.read()]

    def pause(self) -> None:
        if self._window is not None:
            self._window.pause()

    def resume(self) -> None:
        if self._window is not None:
            self._window.resume()


class Window:
    """Measures a stretch of training batches, from its creation on; pauses do not count.

    Args:
        meter: returns the seconds that each device has computed since the run began.

    Attributes:
        wall_s: seconds that have passed up to the last :meth:`pause`, which updates it.
        busy_s: seconds that each device has computed in this time, in the order of ``meter``.
    """

    def __init__(self, meter: Callable[[], Sequence[float]]) -> None:
        self._meter = meter
        self.wall_s = 0.0
        self.busy_s = list[float]()
        self._since: float | None = None
        self.resume()

    def pause(self) -> None:
        """Add what has passed since the last :meth:`resume`, and count nothing from now on."""
        if self._since is not None:
            now = self._meter()
            self.busy_s = _sum(self.busy_s, [b - a for a, b in zip(self._before, now)])
            self.wall_s += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Count again after a pause."""
        if self._since is None:
            self._before = self._meter()
            self._since = time.perf_counter()


def _sum(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one or [0.0] * len(other), other)]
