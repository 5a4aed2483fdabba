"""A record of what a rank did when, and for how long its device computed.

Switched on by ``LIGHTNING_HYBRID_TRACE=DIR`` in the environment: each rank then writes
``DIR/rank<N>.json`` when its run ends, in the format that ``chrome://tracing`` and Perfetto show.
Off, no span is opened. On a GPU a span is the time in which the host queues the work, and
not that of the work itself, which ``torch.profiler`` shows.

:class:`Stopwatch` adds up computing time for ``HybridGabraStrategy(log_performance=True)``.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.cuda import Event

Mark = float | Event
"""Marks when a span has begun: a time in seconds (CPU), or an event on the current stream
(CUDA)."""


class Stopwatch:
    """Adds up the time of spans of computation without waiting for any.

    On CPUs a span lasts from `start` to `stop`. On CUDA it lasts from event to event on the current
    stream; it is counted in the first reading after these have passed, so that reading does not
    synchronise with the device either.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: deque[tuple[Event, Event]] | None = None
        if device.type == "cuda":
            self._events = deque()
        self._seconds = 0.0

    def start(self) -> Mark:
        """Begin a span, and return the mark by which :meth:`stop` ends it. Does not wait."""
        return time.perf_counter() if self._events is None else _passing()

    def stop(self, mark: Mark) -> None:
        """End the span whose :meth:`start` has returned ``mark``. Does not wait."""
        if isinstance(mark, float):
            self._seconds += time.perf_counter() - mark
        elif self._events is not None:
            self._events.append((mark, _passing()))

    def read(self) -> float:
        """Seconds of all spans that have ended since this stopwatch was made. Does not wait."""
        # (a stream's events pass in order: if this one has not passed, no later one has)
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds


def _passing() -> Event:
    event = Event(enable_timing=True)
    event.record()
    return event


def bubble(busy_s: list[float], wall_s: float) -> float:
    """Share of the stages' time in which they run neither forward nor backward; 0 to 1.

    Args:
        busy_s: for each stage of a replica, the seconds of its forwards and backwards.
        wall_s: seconds that passed in the meantime, waiting included.
    """
    return 1.0 - sum(busy_s) / (len(busy_s) * wall_s)


def serial_s(busy_s: list[float], replicas: int) -> float:
    """Estimate the seconds that one device would take: T_s of Akintoye et al. 2022, Eq. 14.

    It is the sum of the forwards and backwards of all stages of all replicas, as long as they take
    here. The measured time T_p, with which it is compared, has loading, losses and optimizer steps
    too; this estimate leaves them out.

    Args:
        busy_s: for each stage of a replica, the seconds of its forwards and backwards.
        replicas: number of replicas; all are assumed to be as busy as this one.
    """
    return replicas * sum(busy_s)


VARIABLE = "LIGHTNING_HYBRID_TRACE"


class Trace:
    """The spans of computation of one rank.

    Args:
        rank: number of the rank, the "process" of the trace.
        name: the name of the rank in the trace.
        watch: adds up the time of all spans; ``None``: nobody asks for it.

    Attributes:
        on: whether spans are recorded for a file, or their times added up. If not, callers need not
            open spans.
    """

    def __init__(self, rank: int, name: str, watch: Stopwatch | None = None) -> None:
        self._watch = watch
        folder = os.environ.get(VARIABLE)
        self._path = Path(folder) / f"rank{rank}.json" if folder else None
        self._rank = rank
        self._name = name
        self._events: list[dict[str, object]] = []
        self.on = folder is not None or watch is not None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Context that records the time spent inside, under this name on the row "compute"."""
        # two clocks: the watch's is exact, the trace's is the same for all ranks of a host
        mark = self._watch.start() if self._watch else None
        start = time.time()
        try:
            yield
        finally:
            if self._watch and mark is not None:
                self._watch.stop(mark)
            if self._path is not None:
                times = {"ts": start * 1e6, "dur": (time.time() - start) * 1e6}
                event = {"name": name, "ph": "X", "pid": self._rank, "tid": "compute", **times}
                self._events.append(event)

    def write(self) -> None:
        """Write what was recorded so far to this rank's file, if a trace is wanted."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        title = {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": self._name}}
        self._path.write_text(json.dumps({"traceEvents": [title, *self._events]}))
