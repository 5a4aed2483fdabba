"""How long each device of a replica computes while a run trains, and who wants to know."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_hybrid.stage import Stopwatch

_BUSY = "busy_s"
"""Name of a worker's report: the seconds that it has computed since the last one."""


class StepWatcher:
    """Looks at the training steps of the driver of replica 0."""

    def batch_starts(self, batch: Any) -> None:
        """A training batch is about to be trained on."""

    def pause(self) -> None:
        """Validation starts."""

    def resume(self) -> None:
        """Validation is over."""

    def begin_anew(self) -> None:
        """From now on stages are cut at other places."""

    def end(self) -> None:
        """Training is over."""


class Measurement:
    """Measures this rank.

    Args:
        device: of this rank.
        wanted: whether anybody reads it.

    Attributes:
        stopwatch: adds up the time of forwards and backwards; ``None`` if nobody reads it.
    """

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self.stopwatch = Stopwatch(device) if wanted else None

    @property
    def reports(self) -> dict[str, Callable[[], Any]]:
        """What a worker reports to its driver, by name."""
        return {} if self.stopwatch is None else {_BUSY: self.stopwatch.read}

    def meter(self, ask_workers: Callable[[str], list[Any]]) -> "BusyMeter":
        """On a driver: what all devices of its replica have measured.

        Args:
            ask_workers: gives each worker's report of this name.
        """
        watch = self.stopwatch
        assert watch is not None, "nobody was to read it"
        return BusyMeter(lambda: [*ask_workers(_BUSY), watch.read()])


class BusyMeter:
    """The seconds that each device of a replica has computed, for several readers.

    Args:
        read: gives those since it was called last: devices 1, 2, ... and then device 0, the
            driver's. It waits until the workers have done what they were told before.
    """

    def __init__(self, read: Callable[[], Sequence[float]]) -> None:
        self._read = read
        self._totals: list[float] = []

    def reader(self) -> Callable[[], list[float]]:
        """A function that gives the seconds since it was called last."""
        before: list[float] = []

        def since() -> list[float]:
            # workers forget what they have told: each reader compares with a sum that is kept here
            nonlocal before
            new = self._read()
            self._totals = [a + b for a, b in zip(self._totals or [0.0] * len(new), new)]
            found = [a - b for a, b in zip(self._totals, before or [0.0] * len(new))]
            before = self._totals
            return found

        return since
