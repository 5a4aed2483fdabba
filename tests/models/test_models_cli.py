import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from datamodules.synth import CohortSpec, generate
from models import ResAttNetClassifier
from models.cli import main

pytestmark = [
    # a cohort this small is read faster than a worker process starts
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cohort")
    spec = CohortSpec(subjects=(("AD", 6), ("NC", 6)), resolution_mm=8.0)
    generate(str(folder / "adni"), spec, workers=1)
    return folder


@pytest.fixture
def config(cohort, tmp_path) -> str:
    """The demo's settings, smaller, on one device."""
    demo = Path(__file__).parents[2] / "configs" / "demo.yaml"
    settings = yaml.safe_load(demo.read_text())
    trainer, data = settings["trainer"], settings["data"]
    del trainer["strategy"]
    trainer |= {"devices": 1, "max_epochs": 1, "enable_progress_bar": False}
    for logger in trainer["logger"]:
        logger["init_args"]["save_dir"] = str(tmp_path)
    data |= {"root": str(cohort / "adni"), "cache_dir": str(cohort / "cache"), "spacing_mm": 8.0}
    data |= {"spatial_shape": [24, 32, 24], "val_fraction": 0.3, "test_fraction": 0.3}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(tmp_path / "config.yaml")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch) -> None:
    # Lightning 2.6 calls jsonargparse by names that its newest version calls old
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def command(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["models", *arguments])
    main()


def checkpoint(run: Path) -> str:
    return str(run / "checkpoints" / "best.ckpt")


def test_every_run_has_one_folder_of_its_own(config, tmp_path, monkeypatch, capsys) -> None:
    command(monkeypatch, "fit", "--config", config)
    run = tmp_path / "run" / "version_0"
    for name in ("config.yaml", "metrics.csv", "tensorboard", "checkpoints/best.ckpt"):
        assert (run / name).exists(), name
    assert f"best checkpoint: {checkpoint(run)}" in capsys.readouterr().out

    best = ["--config", config, "--ckpt_path", checkpoint(run)]
    command(monkeypatch, "test", *best)
    metrics = json.loads((run / "test_metrics.json").read_text())
    assert metrics.keys() >= {"test/accuracy", "test/auroc", "test/sensitivity", "test/loss"}
    command(monkeypatch, "predict", *best)
    command(monkeypatch, "explain", *best, "--subjects", "2", "--layer", "layer1")
    with (run / "explain" / "explain.tsv").open() as file:
        explained = list(csv.DictReader(file, delimiter="\t"))
    with (run / "predictions.tsv").open() as file:
        predicted = {r["image_id"]: r for r in csv.DictReader(file, delimiter="\t")}
    assert {row["label"] for row in explained} == {"0", "1"}
    assert len(list((run / "explain").glob("999_S_*_layer1.png"))) == 2
    for row in explained:
        seen = predicted[row["image_id"]]["probability"]
        assert float(row["probability"]) == pytest.approx(float(seen), abs=2e-4)

    with pytest.raises(SystemExit, match="trained on another split"):
        command(monkeypatch, "explain", *best, "--data.seed", "1")
    command(monkeypatch, "fit", "--config", config)
    assert sorted(path.name for path in run.parent.iterdir()) == ["version_0", "version_1"]


@pytest.mark.parametrize("name", ["validate", "test", "predict", "explain"])
def test_untrained_weights_are_never_evaluated(config, name, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, name, "--config", config)
    assert "ckpt_path" in capsys.readouterr().err


def test_trouble_with_the_data_is_told_without_a_traceback(config, tmp_path, monkeypatch) -> None:
    with pytest.raises(SystemExit, match=str(tmp_path / "nowhere")):
        command(monkeypatch, "fit", "--config", config, "--data.root", str(tmp_path / "nowhere"))


def test_three_classes_are_refused_by_the_classifier_of_two(config, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="task three_way has 3 classes"):
        command(monkeypatch, "fit", "--config", config, "--data.task", "three_way")


def test_help_names_every_command(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("python -m models", "fit", "explain", "Grad-CAM"))


@pytest.mark.conformance
@pytest.mark.distributed
def test_child_processes_repeat_the_command_under_ddp(config, tmp_path) -> None:
    arguments = ["--config", config, "--trainer.strategy", "ddp", "--trainer.devices", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "models", "fit", *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "MEMBER: 2/2" in done.stderr + done.stdout
    run = tmp_path / "run" / "version_0"
    ResAttNetClassifier.load_from_checkpoint(checkpoint(run), map_location="cpu")
    assert not (tmp_path / "run" / "version_1").exists()
