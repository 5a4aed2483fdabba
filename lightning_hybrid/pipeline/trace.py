"""A record of what a rank did when, in the format that ``chrome://tracing`` and Perfetto show.

On CPUs. On a GPU a span is the time in which the host queues the work, and not that of the work
itself, which ``torch.profiler`` shows; all-reduces are left out there.

Switched on by ``LIGHTNING_HYBRID_TRACE=DIR`` in the environment: each rank then writes
``DIR/rank<N>.json`` when its run ends. Off, a span costs one comparison.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_hybrid.pipeline.busy_time import Stopwatch

VARIABLE = "LIGHTNING_HYBRID_TRACE"


class Trace:
    """The spans of one rank.

    Args:
        rank: number of the rank, the "process" of the trace.
        name: what to call it.
        watch: adds up the time of all spans, if that is asked for.
    """

    def __init__(self, rank: int, name: str, watch: Stopwatch | None = None) -> None:
        self._watch = watch
        folder = os.environ.get(VARIABLE)
        self._path = Path(folder) / f"rank{rank}.json" if folder else None
        self._rank, self._name = rank, name
        self._events: list[dict[str, object]] = []

    @property
    def on(self) -> bool:
        return self._path is not None

    @contextmanager
    def span(self, name: str, microbatch: int) -> Iterator[None]:
        """Record the time spent inside, on the row "compute"."""
        if self._path is None and self._watch is None:
            yield
            return
        # two clocks: the watch is exact, the trace is compared over ranks
        mark = self._watch.start() if self._watch else None
        start = time.time()
        try:
            yield
        finally:
            if self._watch and mark is not None:
                self._watch.stop(mark)
            if self.on:
                self.add(f"{name} {microbatch}", "compute", start, time.time())

    def add(self, name: str, row: str, start: float, end: float) -> None:
        """Record a span with given ends, in seconds since the epoch (one clock per host)."""
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        self._events.append({"name": name, "ph": "X", "pid": self._rank, "tid": row, **times})

    def write(self) -> None:
        """Write what was recorded so far."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        title = {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": self._name}}
        self._path.write_text(json.dumps({"traceEvents": [title, *self._events]}))
