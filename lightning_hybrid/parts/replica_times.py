"""Measure in training how fast each replica works on its samples."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

FIRST = 3
"""First batches of a run that are not measured: networks are captured and caches filled in them."""
FEWEST = 5
"""Speeds are computed from at least so many batches."""


class ReplicaTimes:
    """Measures the batches of this replica, and keeps the measurements of all replicas.

    The time of a batch is that from its arrival to the end of its last backward. The averaging of
    gradients, for which all replicas wait, comes later and is left out. (On a GPU events are
    recorded, and nobody waits for them: a batch that is not over when the next one arrives is left
    out.)

    Args:
        device: device of the driver of this replica.
        is_last: function that tells whether the current batch is the last one of its epoch.

    Attributes:
        is_last: as given.
    """

    def __init__(self, device: torch.device, is_last: Callable[[], bool] = bool) -> None:
        self.is_last = is_last
        self._on_gpu = device.type == "cuda"
        self._begun: float | torch.cuda.Event | None = None
        self._ended: float | torch.cuda.Event | None = None
        self._left_out = FIRST
        self._seconds: list[Sequence[float]] = []

    def batch_arrives(self) -> float:
        """Begin to time a batch; return the seconds of the batch before (0: not known)."""
        before = self._of_last()
        self._begun = self._now()
        self._ended = None
        return before

    def backward_is_over(self) -> None:
        """Note the time at the end of a backward; the last one of a batch counts as its end."""
        self._ended = self._now()

    def note(self, seconds: Sequence[float]) -> None:
        """Keep what all replicas have measured for a batch, for :meth:`speeds`.

        The first `FIRST` batches are dropped, and each that some replica has not timed.

        Args:
            seconds: for each of the R replicas, the seconds for one sample; 0: not known.
        """
        if self._left_out:
            self._left_out -= 1
        # a batch that one replica has not timed compares nobody
        elif all(seconds):
            self._seconds.append(seconds)

    def speeds(self) -> tuple[float, ...] | None:
        """Return the samples per second of each replica, and forget the measurements.

        They are medians over the batches since the last call; ``None``: these were too few.
        """
        rows, self._seconds = self._seconds, []
        if len(rows) < FEWEST:
            return None
        # a median forgets the batch in which something else had the device
        return tuple(1 / statistics.median(column) for column in zip(*rows))

    def _now(self) -> "float | torch.cuda.Event":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # on a GPU the clock of the host would show when work was queued, not when it was done
        event.record()
        return event

    def _of_last(self) -> float:
        begun, ended = self._begun, self._ended
        if isinstance(begun, float) and isinstance(ended, float):
            return ended - begun
        if isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            return begun.elapsed_time(ended) / 1000 if ended.query() else 0.0
        return 0.0
