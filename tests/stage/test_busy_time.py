"""How busy the stages were: times without waiting for any, and the two figures made of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hybrid.planning import speedup
from lightning_hybrid.stage import trace as busy_time
from lightning_hybrid.stage.trace import Stopwatch, bubble, serial_s


def test_on_cpus_a_span_lasts_from_call_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 7.0, 9.0, 20.0, 21.0])
    monkeypatch.setattr(busy_time, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    watch = Stopwatch(torch.device("cpu"))
    assert watch.read() == 0.0
    for _ in range(2):
        watch.stop(watch.start())
    assert watch.read() == 2.5
    watch.stop(watch.start())
    assert watch.read() == 3.5


class Event:
    """Of a device that passes events when the test says so, one millisecond apart."""

    recorded = passed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.passed

    def elapsed_time(self, end: Any) -> float:
        assert self.query()
        assert end.query()
        return float(end.number - self.number)


def test_on_cuda_a_span_counts_in_the_first_reading_after_it_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(busy_time, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(3):
        watch.stop(watch.start())
    found = []
    for Event.passed in (1, 3, 6, 6):  # the first span is over, in the middle of the second, all
        found.append(watch.read())
    assert found == [0.0, 0.001, 0.003, 0.003]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (2, 4), (4, 8)])
def test_of_equal_stages_the_figures_are_those_of_the_textbook(
    stages: int, microbatches: int
) -> None:
    busy_s, wall_s = [0.25 * microbatches] * stages, 0.25 * (microbatches + stages - 1)
    idle = (stages - 1) / (microbatches + stages - 1)
    assert bubble(busy_s, wall_s) == pytest.approx(idle)
    assert speedup(serial_s(busy_s, 3), wall_s) == pytest.approx(3 * stages * (1 - idle))
