import json

import pytest

from models import summary
from models.results import save_result


def show(run, monkeypatch, capsys) -> str:
    monkeypatch.setattr("sys.argv", ["summary", str(run)])
    summary.main()
    return capsys.readouterr().out


def test_shows_stages_epochs_and_test_metrics(tmp_path, monkeypatch, capsys) -> None:
    rows = [{"layers": 40, "parameters": 2_000_000, "load": 0.55, "device": 1}]
    plan = {"replicas": 1, "stages": 1, "microbatches": 3, "rows": rows}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    metrics = {"test/accuracy": 0.9375, "test/accuracy_low": 0.84, "test/accuracy_high": 1.0}
    save_result(tmp_path / "test_metrics.json", metrics | {"test/auroc": float("nan")}, {})
    (tmp_path / "metrics.csv").write_text(
        "epoch,val/loss,train/loss_epoch,epoch_s\n0,0.5,,\n0,,0.75,12.34\n1,0.25,,\n"
    )
    shown = show(tmp_path, monkeypatch, capsys)
    for text in ("1 replicas, 1 stages, 3 microbatches", "2,000,000", "55%", "0.750", "12.340"):
        assert text in shown
    assert "0.938" in shown
    assert "0.840 to 1.000" in shown
    assert "auroc" not in shown  # undefined
    assert "where each part of the network ran" in shown


def test_the_delays_of_the_stages_are_shown(tmp_path, monkeypatch, capsys) -> None:
    rows = [{"layers": 40, "parameters": 2, "load": 0.5, "device": device} for device in (1, 0)]
    plan = {"stages": 2, "delays": [17, 0], "rows": rows}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    shown = show(tmp_path, monkeypatch, capsys)
    assert "delay" in shown
    assert "17" in shown


def test_a_run_without_plan_and_test_is_shown_too(tmp_path, monkeypatch, capsys) -> None:
    assert "plan" not in show(tmp_path, monkeypatch, capsys)


def test_wants_the_folder_of_a_run(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["summary"])
    with pytest.raises(SystemExit, match="usage"):
        summary.main()
