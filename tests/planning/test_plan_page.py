import json
import re
from dataclasses import replace
from typing import Any

import pytest
from planned import made_plan, simulate

from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.plan_page import plan_page, predicted_lanes
from lightning_hybrid.schedules.gpipe import gpipe


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


STREAMS = ("1f1b_stream", "pipedream", "ddg", "fdg", "akintoye")


@pytest.mark.parametrize("schedule", STREAMS)
def test_of_a_streamed_schedule_no_step_is_drawn(schedule: str) -> None:
    plan = made_plan(schedule=schedule)
    assert predicted_lanes(plan) == {}
    assert "No step is drawn" in plan_page(plan)


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"weight_part_s": [None] * 4}, ["ffbfbb", "fbfbfb"]),
        ({}, ["ffbfbb", "fbfbwfbww"]),  # with parts that are taken to be equal
        ({"contiguous": False, "bandwidth_bytes_per_s": 1e9}, ["ffffffbbbbbb", "ffffbfbfbbbb"]),
    ],
    ids=["joint", "split", "loop"],
)
def test_backwards_inside_of_calls_are_drawn_among_forwards(
    options: dict[str, Any], drawn: list[str]
) -> None:
    plan = made_plan(schedule="1f1b", microbatches=3, **options)
    kinds = ["".join(s.kind[0] for s in spans) for spans in predicted_lanes(plan).values()]
    assert [kind.replace("r", "").replace("s", "") for kind in kinds] == drawn
    assert "activations of the micro-batches that are under way" in plan_page(plan)


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
    headings = re.findall("<h2>(.*?)</h2>", plan_page(made_plan()))
    assert headings == ["The plan", "One step"]
    bare = Plan(replicas=1, stages=2, microbatches=1, schedule="gpipe", cuts=("b",))
    assert re.findall("<h2>(.*?)</h2>", plan_page(bare)) == ["The plan"]
    assert "predicted" not in plan_page(made_plan().without_times()).partition("<body>")[2]


def test_plans_of_before_are_read() -> None:
    record = json.loads(made_plan().to_json())
    for row in record["rows"]:
        for name in ("forward_s", "backward_s", "cut_bytes", "gradient_bytes"):
            del row[name]
    old = Plan.from_json(json.dumps(record))
    assert old.traffic_bytes is None
    assert predicted_lanes(old) == {}
    assert replace(old, rows=()).table()[0].keys() == {"stage", "device", "replicas"}
