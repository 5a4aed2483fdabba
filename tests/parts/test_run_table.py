"""A fit leaves a line of what it took, and `fit-model` reads such lines."""

import csv
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_hybrid.asking.performance import PerformanceModel
from lightning_hybrid.cli import main
from lightning_hybrid.comm import Coordinates
from lightning_hybrid.driver import StartProgress
from lightning_hybrid.parts import device_times, run_table
from lightning_hybrid.parts.performance_log import PerformanceLog
from lightning_hybrid.parts.run_table import append_line
from lightning_hybrid.planning import Plan

PLAN = Plan(
    replicas=2, stages=4, microbatches=3, schedule="looped", cuts=("a", "b", "c"),
    devices=(1, 0, 1, 0), predicted_step_s=0.25,
)  # fmt: skip


@pytest.fixture(name="trainer")
def _trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # between one look at the clock and the next; a fit has three windows, one with a validation
    seconds = count(step=3)
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr(device_times, "time", clock)
    return SimpleNamespace(
        global_step=0,
        loggers=[],
        log_every_n_steps=2,
        default_root_dir=str(tmp_path),
        fast_dev_run=False,
    )


def fit(trainer: Any, steps: int = 7) -> None:
    world = SimpleNamespace(coordinates=Coordinates(0, 2, 2))
    run: Any = SimpleNamespace(
        trainer=trainer,
        stopwatch=None,
        plans={"": PLAN},
        world=world,
        module=torch.nn.Linear(3, 2),
        progress=StartProgress(None),
    )
    log = PerformanceLog(run)
    log.begin(cast(Any, None))  # nobody asks it, without a stopwatch
    for trainer.global_step in range(steps):
        log.batch_starts(torch.zeros(5, 3))
        if trainer.global_step in (0, 3):  # validation, of which the first does not count either
            log.pause()
            log.resume()
    trainer.global_step = steps
    log.training_ends()


def test_each_fit_adds_a_line_below_one_head(trainer: Any, tmp_path: Path) -> None:
    fit(trainer)
    fit(trainer)
    with (tmp_path / "hybrid_runs.csv").open() as file:
        first, second = csv.DictReader(file)
    assert first == second
    assert first == {
        "replicas": "2", "stages": "4", "stages_per_device": "2.0", "microbatches": "3",
        "devices": "4", "batch_samples": "5.0", "parameters": "8", "step_s": "2.0",
        "predicted_s": "0.25",
    }  # fmt: skip


def test_a_fit_of_which_nothing_was_measured_adds_none(trainer: Any, tmp_path: Path) -> None:
    fit(trainer, steps=1)
    trainer.fast_dev_run = True
    fit(trainer)
    assert not (tmp_path / "hybrid_runs.csv").exists()


def test_a_table_with_other_columns_is_kept_and_the_fit_ends(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_table, "rank_zero_info", said.append)
    (tmp_path / "hybrid_runs.csv").write_text("stages,step_s\n")
    fit(trainer)
    assert (tmp_path / "hybrid_runs.csv").read_text() == "stages,step_s\n"
    assert "the columns stages,step_s" in said[0]


def test_a_model_is_fitted_to_the_tables_of_several_folders(tmp_path: Path) -> None:
    for number in range(9):
        samples, devices = 4.0 * (1 + number % 3), 1 + number // 3
        line = {
            "devices": devices, "batch_samples": samples, "parameters": 8,
            "step_s": 0.1 + samples / devices, "predicted_s": None if number else 1.0,
        }  # fmt: skip
        append_line(tmp_path / f"version_{number % 2}" / "hybrid_runs.csv", line)
    tables = [str(tmp_path / f"version_{k}" / "hybrid_runs.csv") for k in (0, 1)]
    options = ["--extrinsic", "devices", "--strength", "0", "--out", str(tmp_path / "model.json")]
    assert main(["fit-model", *tables, *options]) == 0
    model = PerformanceModel.load(tmp_path / "model.json")
    # parameters are the same in all runs, and predictions are no factor
    assert [factor.name for factor in model.intrinsic] == ["batch_samples"]
    predicted = model.predict_s({"batch_samples": 8.0, "devices": 2.0})
    assert predicted == pytest.approx(4.1, rel=0.01)
