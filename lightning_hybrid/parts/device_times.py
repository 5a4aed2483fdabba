"""Measure how long each device of a replica computes in training, for logs and new plans."""

import time
from collections.abc import Callable, Sequence

from lightning_hybrid.driver import Driver
from lightning_hybrid.run import Part, Run
from lightning_hybrid.worker import BUSY


class StepWatcher(Part):
    """Base of parts that measure training steps, maybe in windows without validations.

    Args:
        run: that is about to begin.
    """

    _window: "Window | None" = None

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trainer = run.trainer

    def begin(self, driver: Driver) -> None:
        self._driver = driver
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was measured before: stages are new."""

    def busy_s(self) -> Sequence[float]:
        """Return the seconds that devices 1, 2, ... and 0, the driver's, have computed in the run.

        Workers carry out earlier commands first.
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
    """What training batches that follow each other take, without pauses between them.

    Args:
        meter: returns the seconds that each device has computed in the run.

    Attributes:
        wall_s: seconds that have passed, up to the last `pause`.
        busy_s: seconds that each device has computed in them.
    """

    def __init__(self, meter: Callable[[], Sequence[float]]) -> None:
        self._meter = meter
        self.wall_s = 0.0
        self.busy_s = list[float]()
        self._since: float | None = None
        self.resume()

    def pause(self) -> None:
        """From now on nothing counts."""
        if self._since is not None:
            now = self._meter()
            self.busy_s = _sum(self.busy_s, [b - a for a, b in zip(self._before, now)])
            self.wall_s += time.perf_counter() - self._since
            self._since = None

    def resume(self) -> None:
        """Training goes on after a pause."""
        if self._since is None:
            self._before = self._meter()
            self._since = time.perf_counter()


def _sum(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one or [0.0] * len(other), other)]
