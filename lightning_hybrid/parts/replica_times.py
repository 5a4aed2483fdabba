"""How fast each replica works on its samples, as it was measured while it trained."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

FIRST = 3
"""Batches of a run that are not looked at: networks are captured and caches filled in them."""
FEWEST = 5
"""Batches of an epoch from which speeds are told."""


class ReplicaTimes:
    """Measures this replica, and keeps what all replicas have measured.

    A batch takes from its arrival to the end of its last backward; the averaging of gradients, for
    which all replicas wait, comes later. (On a GPU events are recorded, and nobody waits for them:
    a batch that is not over when the next but one comes is left out.)

    Args:
        device: of the driver of this replica.
        is_last: whether the batch that is trained on is the last one of its epoch.

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
        """A batch is about to be trained on. Returns the seconds of the one before; 0: unknown."""
        before = self._of_last()
        self._begun = self._now()
        self._ended = None
        return before

    def backward_is_over(self) -> None:
        """A backward of the batch is over, maybe its last one."""
        self._ended = self._now()

    def note(self, seconds: Sequence[float]) -> None:
        """All replicas have told what they have measured.

        Args:
            seconds: (R,) for a sample of each replica; 0: unknown.
        """
        if self._left_out:
            self._left_out -= 1
        # a batch that one replica has not timed compares nobody
        elif all(seconds):
            self._seconds.append(seconds)

    def speeds(self) -> tuple[float, ...] | None:
        """Samples a second of each replica since this was asked last; None: too few batches."""
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
