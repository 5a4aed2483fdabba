"""Measure how long each device of a replica computes in training, for logs and plan checks."""

import time
from collections.abc import Callable, Sequence
from typing import Any


class StepWatcher:
    """Base of objects that follow the training steps, maybe in windows that it pauses."""

    _window: "Window | None" = None

    def batch_starts(self, batch: Any) -> None:
        """Called before each training step."""

    def pause(self) -> None:
        """Called before a validation, whose time is not that of training."""
        if self._window is not None:
            self._window.pause()

    def resume(self) -> None:
        """Called after a validation."""
        if self._window is not None:
            self._window.resume()

    def begin_anew(self) -> None:
        """From now on stages are cut at other places."""

    def end(self) -> None:
        """Called at the end of the training."""


Meter = Callable[[], Sequence[float]]
"""A function that returns the seconds which devices 1, 2, ... of a replica, and then device 0, the
driver's, have computed in the run. It waits until the workers have carried out earlier commands."""


class Window:
    """What training batches that follow each other take, without pauses between them.

    Args:
        meter: of the devices of this replica.

    Attributes:
        wall_s: seconds that have passed, up to the last `pause`.
        busy_s: seconds that each device has computed in them.
    """

    def __init__(self, meter: Meter) -> None:
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
