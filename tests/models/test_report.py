import json
import re

import pytest

from models.report import html
from models.report.sections import _rates, cohort, curves, metrics, plan
from models.report.timeline import _fill_drain, draw_timeline


def test_text_from_files_cannot_become_markup() -> None:
    shown = html.page("<x>", [("a & b", html.note("<script>") + html.table([{"<b>": "<i>"}]))])
    assert not re.search("<(script|b|i|x)>", shown)
    assert "&lt;script&gt;" in shown


def test_parts_without_content_are_left_out() -> None:
    assert "Plan" not in html.page("run", [("Plan", ""), ("Test", "x")])


def test_the_learning_rate_is_drawn_by_step(tmp_path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,lr-SGD,step,val/loss\n,0.1,0,\n0,,3,0.5\n,0.05,4,\n"
    )
    assert _rates(tmp_path / "metrics.csv") == {"lr-SGD": [(0, 0.1), (4, 0.05)]}
    assert curves(tmp_path).startswith("<img")


def test_a_run_without_results_has_no_such_parts(tmp_path) -> None:
    assert curves(tmp_path) == metrics(tmp_path) == plan(tmp_path) == cohort(tmp_path) == ""


def test_the_plan_has_its_table_and_timeline(tmp_path) -> None:
    row = {"layers": 7, "parameters": 1_000_000, "load": 0.5, "partitions": ["stem.conv"]}
    rows = [row | {"device": device} for device in (0, 1)]
    record = {"replicas": 1, "stages": 2, "microbatches": 3, "schedule": "gpipe", "rows": rows}
    (tmp_path / "plan.json").write_text(json.dumps(record))
    shown = plan(tmp_path)
    for text in ("1,000,000", "50%", "stem.conv", "3 microbatches", "<img"):
        assert text in shown


def test_the_timeline_fills_and_drains() -> None:
    """Two equal stages, two micro-batches: five slots of a forward or half a backward pass each.

    stage 0:  F0 F1 .  .  B0 B1
    stage 1:  .  F0 F1 B0 B1 .      (a backward takes two slots)
    """
    slot = 1 / 12
    work = {(s, m, f): start / slot for s, m, start, _, f in _fill_drain([0.5, 0.5], 2)}
    assert work == pytest.approx(
        {
            (0, 0, True): 0,
            (0, 1, True): 1,
            (1, 0, True): 1,
            (1, 1, True): 2,
            (1, 0, False): 3,
            (1, 1, False): 5,
            (0, 0, False): 5,
            (0, 1, False): 7,
        }
    )


@pytest.mark.parametrize("plan", [{}, {"schedule": "1f1b", "rows": [{"load": 0.5}] * 2}])
def test_what_is_not_known_is_not_drawn(plan) -> None:
    assert draw_timeline(plan) is None
