"""Measure how long each device of a replica computes in training, for logs and plan checks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_hybrid.stage import Stopwatch

_BUSY = "busy_s"
"""Name of the report of a worker with the seconds that it has computed since its last report."""


class StepWatcher:
    """Base of objects that follow the training steps, on the driver of replica 0.

    Its methods do nothing.
    """

    def batch_starts(self, batch: Any) -> None:
        """Called before each training step."""

    def pause(self) -> None:
        """Called before a validation."""

    def resume(self) -> None:
        """Called after a validation."""

    def end(self) -> None:
        """Called at the end of the training."""


class Measurement:
    """Measures how long this rank computes.

    Args:
        device: device of this rank.
        wanted: whether the result is used; else nothing is measured.

    Attributes:
        stopwatch: adds up the time of forwards and backwards; ``None`` if it is not wanted.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self.stopwatch = Stopwatch(device) if wanted else None

    @property
    def reports(self) -> dict[str, Callable[[], Any]]:
        """By name, functions that make a worker's reports to its driver."""
        return {} if self.stopwatch is None else {_BUSY: self.stopwatch.read}

    def meter(self, ask_workers: Callable[[str], list[Any]]) -> "BusyMeter":
        """On a driver, make the meter of all devices of its replica.

        Args:
            ask_workers: returns each worker's report of a given name.
        """
        watch = self.stopwatch
        assert watch is not None, "nobody was to read it"
        return BusyMeter(lambda: [*ask_workers(_BUSY), watch.read()])


class BusyMeter:
    """The seconds that each device of a replica has computed, for several readers.

    Args:
        read: returns the seconds since its last call for devices 1, 2, ... and then device 0, the
            driver's. It waits until the workers have carried out all earlier commands.
    """

    def __init__(self, read: Callable[[], Sequence[float]]) -> None:
        self._read = read
        self._totals: list[float] = []

    def reader(self) -> Callable[[], list[float]]:
        """Make a function that returns the seconds of each device since its own last call."""
        before: list[float] = []

        def since() -> list[float]:
            # `_read` begins at zero after each call: totals are kept here for all readers
            nonlocal before
            new = self._read()
            self._totals = [a + b for a, b in zip(self._totals or [0.0] * len(new), new)]
            found = [a - b for a, b in zip(self._totals, before or [0.0] * len(new))]
            before = self._totals
            return found

        return since
