import json
import re

from models.report import html
from models.report.flow import flow_chart
from models.report.sections import (
    _by_epoch,
    _rates,
    again,
    cohort,
    curves,
    explanations,
    localisation,
    metrics,
    plan,
)
from models.results import save_result
from models.tables import write_table


def test_text_from_files_cannot_become_markup() -> None:
    shown = html.page("<x>", [("a & b", html.note("<script>") + html.table([{"<b>": "<i>"}]))])
    assert not re.search("<(script|b|i|x)>", shown)
    assert "&lt;script&gt;" in shown


def test_a_number_and_its_interval_share_a_cell() -> None:
    row = {"auroc": 0.9, "auroc_low": 0.81234, "auroc_high": 0.95, "f1": 0.5}
    shown = html.table([row, row | {"auroc_low": "", "auroc_high": ""}])
    assert "<td>0.900 (0.812 to 0.950)</td><td>0.500</td>" in shown
    assert "<td>0.900</td><td>0.500</td>" in shown
    assert "low" not in shown


def test_parts_without_content_are_left_out() -> None:
    assert "Plan" not in html.page("run", [("Plan", ""), ("Test", "x")])


def test_rows_of_one_epoch_are_one_epoch(tmp_path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,val/loss,train/loss_epoch\n0,0.5,\n0,,0.75\n1,0.25,\n"
    )
    epochs = _by_epoch(tmp_path / "metrics.csv")
    assert epochs["0"] == {"epoch": "0", "val/loss": "0.5", "train/loss_epoch": "0.75"}
    assert epochs.keys() == {"0", "1"}


def test_the_learning_rate_is_drawn_by_step(tmp_path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,lr-SGD,step,val/loss\n,0.1,0,\n0,,3,0.5\n,0.05,4,\n,0.01"  # and then it was killed
    )
    assert _rates(tmp_path / "metrics.csv") == {"lr-SGD": [(0, 0.1), (4, 0.05)]}
    assert curves(tmp_path).startswith("<img")


def test_a_run_without_results_has_no_such_parts(tmp_path) -> None:
    assert curves(tmp_path) == metrics(tmp_path) == plan(tmp_path) == cohort(tmp_path) == ""


def test_who_was_left_out_stands_in_a_chart_with_the_reasons(tmp_path) -> None:
    size = {"scans": 5, "people": 3}
    part = size | {"classes": {"NC": 2, "AD": 3}}
    counts = {
        "found": {"scans": 9, "people": 6},
        "excluded": {"scans": 4, "people": 3, "why": {"not_t1": 3, "<b>": 1}},
        "bad": {"scans": 0, "people": 0, "why": {}},
        "used": size,
        "later_scans_of_held_out_people": 2,
        "parts": {"train": part},
    }
    assert flow_chart(tmp_path) == ""
    (tmp_path / "flow.json").write_text(json.dumps(counts))
    shown = flow_chart(tmp_path)
    for text in ("9 scans of 6 people", "3 not t1", "1 &lt;b&gt;", "2 NC, 3 AD", "2 later scans"):
        assert text in shown
    assert "<b>bad</b>" not in shown


def test_cases_are_shown_with_their_meaning_and_pictures(tmp_path) -> None:
    folder = tmp_path / "explain"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    case = {
        "title": "999_S_0001 is AD",
        "meaning": "hot is evidence",
        "pictures": [{"file": "a.png", "title": "Grad-CAM"}],
        "page": "a.html",
    }
    record = {"explained": "AD", "cases": [case], "means": ["gone.png"]}
    (folder / "explain.json").write_text(json.dumps(record))
    shown = explanations(tmp_path)
    for text in ("Evidence for AD", "999_S_0001 is AD", "hot is evidence", "explain/a.html"):
        assert text in shown
    assert shown.count("data:image/png;base64,cGljdHVyZQ==") == 1


def test_scores_stand_beside_both_sanity_checks_or_the_missing_one_is_named(tmp_path) -> None:
    folder = tmp_path / "explain"
    folder.mkdir()
    row = {"method": "gradcam", "peak_in": 0.9, "times_chance": 3.5}
    region = {"method": "gradcam", "region": "left hippocampus", "times": 4.0}
    write_table([region], folder / "regions.tsv")
    networks = ["trained", "untrained"]
    write_table([{"network": n} | row for n in networks], folder / "localisation.tsv")
    shown = localisation(tmp_path)
    assert all(text in shown for text in ("untrained", "3.500", "left hippocampus"))
    assert "--data.shuffle_labels true" in shown
    networks.append("shuffled")
    write_table([{"network": n} | row for n in networks], folder / "localisation.tsv")
    assert "--data.shuffle_labels true" not in localisation(tmp_path)


def test_what_was_typed_is_what_to_type_again(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    folder = tmp_path / "explain"
    folder.mkdir()
    typed = ["python", "-m", "models", "explain", "--truth", "a cohort/truth/planted"]
    assert "--truth" not in again(tmp_path)
    (folder / "environment.json").write_text(json.dumps({"command": typed, "environment": {}}))
    assert "--truth &#x27;a cohort/truth/planted&#x27;" in again(tmp_path)


def test_the_plan_has_its_table_and_names_its_page(tmp_path) -> None:
    row = {"layers": 7, "parameters": 1_000_000, "load": 0.5, "partitions": ["stem.conv"]}
    rows = [row | {"device": device} for device in (0, 1)]
    record = {"replicas": 1, "stages": 2, "microbatches": 3, "schedule": "gpipe", "rows": rows}
    (tmp_path / "plan.json").write_text(json.dumps(record))
    shown = plan(tmp_path)
    for text in ("1,000,000", "50%", "stem.conv", "1 replica,", "3 micro-batches"):
        assert text in shown
    assert "plan.html" not in shown
    (tmp_path / "plan.html").touch()
    assert "plan.html" in plan(tmp_path)


def test_the_delays_of_the_stages_are_in_the_table_of_the_plan(tmp_path) -> None:
    row = {"layers": 7, "parameters": 1, "load": 0.5, "device": 0, "partitions": ["stem.conv"]}
    record = {"stages": 2, "schedule": "fdg", "rows": [row] * 2}
    (tmp_path / "plan.json").write_text(json.dumps(record))
    assert ">delay" not in plan(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(record | {"delays": [17, 0]}))
    assert ">delay" in plan(tmp_path)
    assert ">17<" in plan(tmp_path)


def test_every_test_has_its_settings_and_figures_of_its_own(tmp_path) -> None:
    settings = {"checkpoint": "best.ckpt", "spacing_mm": 2.0, "spatial_shape": [91, 109, 91]}
    for number, mm in (("", 2.0), ("_2", 4.0)):
        other = settings | {"spacing_mm": mm, "shuffled": mm == 4.0, "scans": "0abc"}
        save_result(tmp_path / f"test_metrics{number}.json", {"test/accuracy": mm / 8}, other)
    rows = [{"label": n, "p_NC": 1.0 - n, "p_AD": float(n)} for n in (0, 1)]
    write_table(rows, tmp_path / "test_predictions_2.tsv")
    first, second = metrics(tmp_path).split("<h3>test_metrics_2</h3>")
    assert "best.ckpt; 91 x 109 x 91 voxels of 2.0 mm" in first
    assert "0.250" in first
    assert "<img" not in first  # its table is gone; that of the second test does not stand in
    assert "voxels of 4.0 mm; labels shuffled" in second
    assert second.count("<img") == 3
