"""Age and MMSE as tasks, through every command: what is about classes is absent, and not empty."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cohorts import made
from lightning.pytorch import LightningDataModule
from test_classifier import NARROW, Bright, trainer
from test_models_cli import checkpoint, command, finished, smaller
from test_predict_scans import scans_of
from torch.utils.data import DataLoader

from datamodules.labels import TASKS
from datamodules.records import ScanRecord
from datamodules.synth import CohortSpec
from models import ResAttNetClassifier
from models.card import card
from models.commands.cohort_tables import by_group
from models.commands.export import export
from models.commands.external import main as external
from models.commands.groups import read_maps
from models.commands.predict_scans import main as predict
from models.drawing import draw_bland_altman
from models.errors import UseError
from models.report import write_report
from models.results import load_metrics, load_settings
from models.tables import read_table
from models.tasks import CLASSES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]
OF_CLASSES = (
    r"accuracy|AUROC|auroc|sensitiv|specific|threshold|temperature|calibrat|Brier|ROC|class "
)


class Numbers(LightningDataModule):
    """Scans whose number is 60, and 80 with a bright corner."""

    target_scale = (70.0, 10.0)

    class Scans(Bright):
        def __getitem__(self, i: int) -> dict:
            return super().__getitem__(i) | {"label": torch.tensor(60.0 + 20 * (i % 2))}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.Scans(), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


def test_of_a_few_scans_neither_limits_nor_correlations_are_said() -> None:
    random = np.random.default_rng(0)
    true = random.normal(75, 6, 40)
    told = true[:, None] + random.normal(0, 3, (40, 1))
    many, few = (draw_bland_altman(told[:n], true[:n], ("age",)).axes[0] for n in (40, 5))
    assert [len(axes.texts) for axes in (many, few)] == [3, 1]
    for axes in (many, few):
        low, high = axes.get_ylim()
        assert all(low < text.xy[1] < high for text in axes.texts)
    records = [
        ScanRecord(subject=f"P{n}", image_id=f"I{n}", path="", site=f"S{n // 30}")
        for n in range(40)
    ]
    rows = [r for r in by_group(records, told, true, ("age",)) if r["by"] == "site"]
    assert [isinstance(row["pearson_r"], float) for row in rows] == [True, True]
    rows = [r for r in by_group(records[28:], told[28:], true[28:], ("age",)) if r["by"] == "site"]
    assert [row["pearson_r"] == "" for row in rows] == [True, False]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that tells MMSE, tested, explained, with new scans, another cohort and a report."""
    folder = tmp_path_factory.mktemp("mmse")
    spec = CohortSpec((("AD", 6), ("NC", 6)), 8.0)
    (folder / "adni").symlink_to(made(tmp_path_factory, spec))
    (folder / "new").symlink_to(
        made(tmp_path_factory, CohortSpec((("AD", 4), ("NC", 4)), 8.0, seed=7))
    )
    options = ["--config", smaller("modern", folder, folder), "--data.task", "mmse"]
    options += ["--model.warmup_epochs", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        command(patch, "fit", *options)
        found = folder / "modern" / "version_0"
        best = ["--ckpt_path", checkpoint(found)]
        command(patch, "test", *options, *best)
        command(patch, "predict", *options, *best)
        explaining = ["--subjects", "1", "--methods", "[hirescam,gradient]"]
        command(patch, "explain", *options, *best, *explaining)
    assert external([*best, "--cohort", str(folder / "new"), "--rename", "NEW_"]) == 0
    scan = scans_of(folder / "new")[0]
    assert predict([*best, "--scans", str(scan)]) == 0
    write_report(found)
    return found


def test_the_loss_is_the_squared_error_in_deviations_of_the_training_scans(tmp_path) -> None:
    model = ResAttNetClassifier(task="age", widths=NARROW)
    model.scale = (70.0, 10.0)
    loss = model._loss(torch.tensor([[1.0], [0.0]]), torch.tensor([85.0, 60.0]), smoothing=0.5)
    assert loss.item() == pytest.approx((0.5**2 + 1.0**2) / 2)


@pytest.mark.conformance
def test_a_network_learns_a_number_and_its_checkpoint_tells_it_in_its_own_units(tmp_path) -> None:
    torch.manual_seed(0)
    model, data = ResAttNetClassifier(task="age", learning_rate=0.02, widths=NARROW), Numbers()
    fitting = trainer(tmp_path, max_epochs=60)
    fitting.fit(model, datamodule=data)
    fitting.save_checkpoint(tmp_path / "last.ckpt")
    again = ResAttNetClassifier(task="age", widths=NARROW)
    [found] = trainer(tmp_path).test(again, data, str(tmp_path / "last.ckpt"), verbose=False)
    assert found["test/mae"] < 4  # whoever tells the mean of all is wrong by 10
    assert found["test/r2"] > 0.7


def test_a_number_without_its_scale_is_refused_before_training(tmp_path) -> None:
    model, scans = ResAttNetClassifier(task="age", widths=NARROW), Numbers().train_dataloader()
    with pytest.raises(ValueError, match="target_scale"):
        trainer(tmp_path, max_epochs=1).fit(model, scans, scans)


def test_a_test_writes_errors_in_points_beside_a_linear_baseline(run) -> None:
    found = load_metrics(run / "test_metrics.json")
    rows = read_table(run / "test_predictions.tsv")
    assert list(rows[0])[:5] == ["subject", "image_id", "label", "predicted_MMSE", "error"]
    off = [abs(float(row["predicted_MMSE"]) - float(row["label"])) for row in rows]
    assert found["test/mae"] == pytest.approx(np.mean(off), abs=1e-3)
    assert all(0 <= float(row["label"]) <= 30 for row in rows)
    settings = load_settings(run / "test_baseline.json")
    assert "linear regression on age, sex, " in settings["verdict"]
    assert load_metrics(run / "test_baseline.json").keys() >= {"mae", "rmse", "bias"}
    drawn = {path.name for path in run.glob("test_*.png")}
    assert drawn == {"test_told.png", "test_bland_altman.png"}


def test_another_cohort_and_new_scans_are_told_the_number(run) -> None:
    (folder,) = (run / "external").iterdir()
    rows = {row["metric"]: row for row in read_table(folder / "internal_and_external.tsv")}
    assert rows.keys() == {"mae", "rmse", "r2", "pearson_r", "bias", "bias_slope"}
    assert float(rows["mae"]["internal"]) > 0
    assert not (folder / "calibration.tsv").exists()
    groups = read_table(folder / "groups.tsv")
    assert groups[0].keys() >= {"mae", "bias"}
    assert "of_last_class" not in groups[0]
    (new,) = read_table(run / "new_scans" / "predictions.tsv")
    assert 0 < float(new["predicted_MMSE"]) < 40
    assert not [name for name in new if name.startswith(("p_", "calibrated"))]


def test_an_explanation_shows_what_raises_the_number(run) -> None:
    record = json.loads((run / "explain" / "explain.json").read_text())
    assert record["evidence"] == "what raises the MMSE told"
    tested = {r["image_id"]: r["predicted_MMSE"] for r in read_table(run / "test_predictions.tsv")}
    rows = read_table(run / "explain" / "explain.tsv")
    for row in rows:
        assert float(row["told"]) == pytest.approx(float(tested[row["image_id"]]), abs=1e-3)
    with pytest.raises(UseError, match="explains a number"):
        read_maps(run / "explain", "occlusion")


def test_pages_about_a_number_say_nothing_of_classes(run) -> None:
    page = (run / "report.html").read_text()
    text = re.sub(r"<pre>.*?</pre>|<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert not re.findall(rf"(?:\S+ ){{0,4}}(?:{OF_CLASSES})", text)
    assert "mean absolute error" in dict(card(next((run / "checkpoints").iterdir())))["Error"]
    said = (run / "new_scans" / "predictions.html").read_text()
    assert "MMSE" in said
    assert not re.search("Probabilit|against", said)


def test_a_bundle_of_a_number_is_refused_by_name(run, tmp_path) -> None:
    with pytest.raises(UseError, match="tells a number, MMSE"):
        export(next((run / "checkpoints").iterdir()), tmp_path / "bundle")


def test_the_network_and_the_data_know_the_same_tasks() -> None:
    assert {name: task.class_names for name, task in TASKS.items()} == CLASSES


@pytest.mark.conformance
@pytest.mark.distributed
def test_two_stages_tell_the_numbers_of_one_device(run, tmp_path) -> None:
    home = run.parents[1]
    config = smaller("demo", home, tmp_path)
    strategy = ["--trainer.strategy", "lightning_hybrid.HybridGabraStrategy"]
    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 2, "num_microbatches": 1}
    strategy += [t for n, size in sizes.items() for t in (f"--trainer.strategy.{n}", str(size))]
    told = []
    for extra in ([], [*strategy, "--trainer.devices", "2"]):
        options = ["--config", config, "--data.task", "age", "--data.cache_dir", str(home / "c")]
        finished("fit", *options, *extra)
        one = tmp_path / "run" / f"version_{len(told)}"
        finished("test", *options, *extra, "--ckpt_path", checkpoint(one))
        told.append(
            (
                torch.load(checkpoint(one), weights_only=True),
                read_table(one / "test_predictions.tsv"),
            )
        )
    (alone, rows), (staged, others) = told
    assert alone["target_scale"] == staged["target_scale"]
    for name, value in alone["state_dict"].items():
        torch.testing.assert_close(
            staged["state_dict"][name], value, rtol=1e-4, atol=1e-5, msg=name
        )
    for row, other in zip(rows, others, strict=True):
        assert float(other["predicted_age"]) == pytest.approx(float(row["predicted_age"]), abs=1e-2)


def test_folds_of_a_number_are_averaged_with_their_lowest_and_highest(run, tmp_path) -> None:
    best = next((run / "checkpoints").iterdir())
    for number in range(2):
        folder = tmp_path / "cv" / f"fold_{number}" / "run" / "version_0" / "checkpoints"
        folder.mkdir(parents=True)
        shutil.copy(best, folder)
        kept = torch.load(folder / best.name, weights_only=True)
        kept["state_dict"]["network.classifier.bias"] += number
        torch.save(kept, folder / best.name)
        mark = {"wanted": {}, "run": "/elsewhere/run/version_0"}
        (folder.parents[2] / "done.json").write_text(json.dumps(mark))
    scan = scans_of(run.parents[1] / "new")[0]
    out = tmp_path / "out"
    assert (
        predict(["--ckpt_path", str(tmp_path / "cv"), "--scans", str(scan), "--out", str(out)]) == 0
    )
    (row,) = read_table(out / "predictions.tsv")
    low, high = float(row["lowest_MMSE"]), float(row["highest_MMSE"])
    spread = kept["target_scale"][1]
    assert high - low == pytest.approx(spread, rel=1e-3)
    assert float(row["predicted_MMSE"]) == pytest.approx((low + high) / 2, abs=1e-3)
