import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from planned import planned, simulate

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import traced_step
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.plan_page import plan_page, predicted_lanes
from lightning_hybrid.planning.traced_step import measured_step
from lightning_hybrid.schedules.gpipe import gpipe
from lightning_hybrid.stage import trace


def made_plan(**changes: object) -> Plan:
    arguments = {
        "names": list("abcd"),
        "forward_s": [1.0] * 4,
        "backward_s": [2.0] * 4,
        "cut_bytes": [8.0] * 3,
        "parameters": [1] * 4,
        "layers": [1] * 4,
        "replicas": 2,
        "stages": 2,
        "microbatches": 2,
        "bandwidth_bytes_per_s": 8.0,
        "step_s": [0.5] * 4,
        "reduce_s": [1.0] * 4,
        "memory_bytes": [10] * 4,
        "gradient_bytes": [100] * 4,
    }
    return planned(**(arguments | changes))


def test_the_drawn_step_is_the_simulated_one() -> None:
    plan = made_plan()
    lanes = predicted_lanes(plan)
    expected = simulate(
        gpipe(2, 2), [2.0, 2.0], [4.0, 4.0], send_s=[1.0], reduce_s=[2.0] * 2, step_s=[1.0] * 2
    )
    assert list(lanes) == ["device 1", "device 0 (driver)"]
    ends = [span.end_s for spans in lanes.values() for span in spans]
    assert max(ends) == expected.makespan_s == plan.predicted_step_s
    busy = [
        sum(s.end_s - s.start_s for s in spans if s.kind != "reduce") for spans in lanes.values()
    ]
    assert tuple(busy) == expected.busy_s


STREAMS = ("1f1b", "pipedream", "ddg", "fdg", "akintoye")


@pytest.mark.parametrize("schedule", STREAMS)
def test_of_a_streamed_schedule_no_step_is_drawn(schedule: str) -> None:
    plan = made_plan(schedule=schedule)
    assert predicted_lanes(plan) == {}
    assert "No step is drawn" in plan_page(plan)


def test_a_loop_is_drawn_by_device_as_long_as_its_predicted_step() -> None:
    plan = made_plan(schedule="looped", backward_s=[2.0, 1.0, 2.0, 4.0])
    lanes = predicted_lanes(plan)
    assert list(lanes) == ["device 1", "device 0 (driver)"]
    ends = [span.end_s for spans in lanes.values() for span in spans]
    assert max(ends) == pytest.approx(plan.predicted_step_s)
    assert [span.label for span in lanes["device 1"] if span.kind == "forward"] == [
        "0.0",
        "0.1",
        "2.0",
        "2.1",
    ]


def test_traffic_is_activations_gradients_and_the_ring() -> None:
    # two micro-batches of 8 bytes, and with two replicas as much as the gradients
    assert made_plan().traffic_bytes == (2 * 8 + 200, 2 * 8 + 200)
    assert made_plan(replicas=1).traffic_bytes == (16, 16)


def test_a_page_has_every_section_and_the_plan_of_a_hand_made_one_fewer() -> None:
    headings = re.findall("<h2>(.*?)</h2>", plan_page(made_plan(), limits=[50, 50]))
    assert headings == ["The plan", "One step", "Load", "Memory", "The network and its cuts"]
    bare = Plan(replicas=1, stages=2, microbatches=1, schedule="gpipe", cuts=("b",))
    assert re.findall("<h2>(.*?)</h2>", plan_page(bare)) == ["The plan"]
    assert "predicted" not in plan_page(made_plan().without_times()).partition("<body>")[2]


def write_trace(folder: Path, spans: dict[int, list[tuple[str, float, float]]]) -> None:
    for rank, events in spans.items():
        one = trace.Trace(rank, str(Coordinates(rank, 1, 2)))
        for name, start, end in events:
            one.add(name, "compute", start, end)
        one.write()
    (folder / "rank9.json").write_text("no trace")


def test_a_step_comes_out_of_the_trace_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path))
    plan = made_plan(replicas=1)
    worker, driver = [], []
    for start in (0.0, 100.0, 200.0):  # a validation, then a step of 20 s
        worker += [(f"forward {m}", start + m, start + m + 1) for m in (0, 1)]
        driver += [(f"forward {m}", start + 2 + m, start + 3 + m) for m in (0, 1)]
        start += 10
        worker += [(f"forward {m}", start + m, start + m + 1) for m in (0, 1)]
        driver += [(f"forward {m}", start + 2 + m, start + 3 + m) for m in (0, 1)]
        driver += [(f"backward {m}", start + 8 - 2 * m, start + 10 - 2 * m) for m in (0, 1)]
        worker += [(f"backward {m}", start + 18 - 2 * m, start + 20 - 2 * m) for m in (0, 1)]
    write_trace(tmp_path, {0: driver, 1: worker})
    step = measured_step(plan, None)
    assert len(step) == 8
    assert min(work.start_s for work in step) == 0.0
    assert max(work.end_s for work in step) == pytest.approx(20.0)
    assert [w.device for w in step[:2]] == [1, 1]
    plan.to_html(tmp_path / "page.html")
    assert "Measured" in (tmp_path / "page.html").read_text()


def test_the_name_of_the_variable_is_that_of_the_trace() -> None:
    assert traced_step.VARIABLE == trace.VARIABLE


def test_a_trace_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds no trace of a training step with 2 stages"):
        made_plan().to_html(tmp_path / "page.html", trace=tmp_path)


def test_a_page_of_a_run_without_a_trace_shows_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(trace.VARIABLE, raising=False)
    made_plan().to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "Predicted" in text
    assert "Measured" not in text


def test_plans_of_before_are_read() -> None:
    record = json.loads(made_plan().to_json())
    for row in record["rows"]:
        for name in ("forward_s", "backward_s", "cut_bytes", "gradient_bytes"):
            del row[name]
    old = Plan.from_json(json.dumps(record))
    assert old.traffic_bytes is None
    assert predicted_lanes(old) == {}
    assert replace(old, rows=()).table()[0].keys() == {"stage", "device", "replicas"}
