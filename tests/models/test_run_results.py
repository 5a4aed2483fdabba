import json
import math

from models.predictions import Prediction
from models.results import free_path, load_metrics, save_result, scans_hash


def test_a_result_of_other_settings_is_never_replaced(tmp_path) -> None:
    for spacing in (2.0, 4.0, 2.0):
        settings = {"spacing_mm": spacing, "spatial_shape": (91, 109, 91)}
        path = free_path(tmp_path, "test_metrics", settings)
        save_result(path, {"test/accuracy": spacing}, settings)
    found = {path.name: load_metrics(path)["test/accuracy"] for path in tmp_path.iterdir()}
    assert found == {"test_metrics.json": 2.0, "test_metrics_2.json": 4.0}


def test_a_file_of_another_kind_is_not_replaced(tmp_path) -> None:
    (tmp_path / "test_metrics.json").write_text("{}")
    assert free_path(tmp_path, "test_metrics", {}).name == "test_metrics_2.json"


def test_a_table_of_unknown_settings_is_not_replaced(tmp_path) -> None:
    (tmp_path / "predictions.tsv").touch()
    path = free_path(tmp_path, "predictions", {})
    assert path.name == "predictions_2.json"
    save_result(path, {}, {})
    path.with_suffix(".tsv").touch()
    assert free_path(tmp_path, "predictions", {}) == path


def test_what_is_undefined_is_null_and_not_read_back(tmp_path) -> None:
    path = tmp_path / "a.json"
    save_result(path, {"a": 1.0, "b": math.nan}, {})
    assert json.loads(path.read_text())["metrics"] == {"a": 1.0, "b": None}
    assert load_metrics(path) == {"a": 1.0}


def test_the_hash_knows_scans_and_labels_in_any_order() -> None:
    rows = [Prediction(f"s{i}", f"I{i}", i % 2, (0.5, 0.5)) for i in range(4)]
    assert scans_hash(rows) == scans_hash(rows[::-1])
    other = [Prediction("s0", "I0", 1, (0.5, 0.5)), *rows[1:]]
    assert scans_hash(rows) != scans_hash(other)
