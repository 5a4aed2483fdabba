"""How long this rank's device computes, for ``HybridGabraStrategy(log_performance=True)``."""

import time
from collections import deque

import torch
from torch.cuda import Event

Mark = float | Event
"""When a span began: seconds, or an event on the device's current stream."""


class Stopwatch:
    """Adds up the time of spans of computation without waiting for any.

    On CPUs a span lasts from call to return. On CUDA it lasts from event to event on the current
    stream; it is counted in the first reading after it has passed, so that reading does not
    synchronise with the device either.

    Args:
        device: what computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: deque[tuple[Event, Event]] | None = None
        if device.type == "cuda":
            self._events = deque()
        self._seconds = 0.0

    def start(self) -> Mark:
        """Begin a span; its end is told by the mark that is returned."""
        return time.perf_counter() if self._events is None else _passing()

    def stop(self, mark: Mark) -> None:
        """End the span that began with this mark."""
        if isinstance(mark, float):
            self._seconds += time.perf_counter() - mark
        elif self._events is not None:
            self._events.append((mark, _passing()))

    def read(self) -> float:
        """Seconds of the spans that have ended since the last reading."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _passing() -> Event:
    event = Event(enable_timing=True)
    event.record()
    return event


def bubble(busy_s: list[float], wall_s: float) -> float:
    """Share of the stages' time in which they run neither forward nor backward.

    Args:
        busy_s: seconds of forward and backward of each stage of a replica.
        wall_s: how long it took.
    """
    return 1.0 - sum(busy_s) / (len(busy_s) * wall_s)


def serial_s(busy_s: list[float], replicas: int) -> float:
    """T_s of Eq. 14 of Akintoye et al. 2022, seconds on one device; a reconstruction.

    It is not known while several devices work. Taken for it are the forwards and backwards of all
    stages of all replicas, one after the other, as long as they take here. What one device needs
    for loading, losses and optimizer steps is left out of it, but not of the T_p beside it.

    Args:
        busy_s: seconds of forward and backward of each stage of a replica.
        replicas: number of replicas; each is taken to be as busy.
    """
    return replicas * sum(busy_s)
