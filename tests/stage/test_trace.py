"""What a rank did is written as Perfetto reads it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hybrid.stage import trace as module
from lightning_hybrid.stage.trace import VARIABLE, Trace


class Watch:
    """Counts what is measured."""

    def __init__(self) -> None:
        self.spans: list[float] = []

    def start(self) -> float:
        return 1.0

    def stop(self, mark: float) -> None:
        self.spans.append(mark)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Traces go here; a look at the clock takes half a second."""
    ticks = iter(range(100))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "deep" / "traces"))
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 10 + next(ticks) / 2))
    return tmp_path / "deep" / "traces"


def test_spans_are_written_in_microseconds_one_process_a_rank(folder: Path) -> None:
    trace = Trace(3, "replica 1, worker 2")
    with trace.span("forward 4"):
        pass
    with pytest.raises(KeyError), trace.span("backward 0"):  # it took its time, too
        raise KeyError("on purpose")
    trace.write()
    title, *spans = json.loads((folder / "rank3.json").read_text())["traceEvents"]
    assert (title["name"], title["ph"], title["pid"]) == ("process_name", "M", 3)
    assert title["args"] == {"name": "replica 1, worker 2"}
    assert [(s["name"], s["tid"], s["ts"], s["dur"]) for s in spans] == [
        ("forward 4", "compute", 10e6, 0.5e6),
        ("backward 0", "compute", 11e6, 0.5e6),
    ]
    assert {(s["ph"], s["pid"]) for s in spans} == {("X", 3)}


def test_without_the_variable_nothing_is_recorded_but_time_is_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    watch: Any = Watch()
    trace = Trace(0, "driver", watch)
    with trace.span("forward 0"):
        pass
    trace.write()
    assert watch.spans == [1.0]
    assert [*tmp_path.iterdir()] == []


def test_time_is_added_up_beside_a_record(folder: Path) -> None:
    watch: Any = Watch()
    trace = Trace(0, "driver", watch)
    with pytest.raises(KeyError), trace.span("forward 0"):
        raise KeyError("on purpose")
    assert watch.spans == [1.0]
