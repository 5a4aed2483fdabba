"""The networks of several folds as one model: averaged, with their spread, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cohorts import made
from test_predict_scans import scans_of

from datamodules.errors import SplitError
from datamodules.synth import CohortSpec
from models.card import card_of_folds
from models.commands.export import main as export
from models.commands.external import main as external
from models.commands.external import refuse_trained_on
from models.commands.predict_scans import load, load_all
from models.commands.predict_scans import main as predict
from models.errors import UseError
from models.folds import DONE, checkpoints_of
from models.tables import read_table, write_table

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")]
CLASSIFIER = "network.classifier.weight"


@pytest.fixture
def folds(trained, tmp_path) -> Path:
    """Three runs, as ``folds`` leaves them, whose last layers and training people differ."""
    folder = tmp_path / "cv"
    for number in range(3):
        run = folder / f"fold_{number}" / "run" / "version_0"
        (run / "checkpoints").mkdir(parents=True)
        checkpoint = torch.load(trained / "best.ckpt", weights_only=True)
        weight = checkpoint["state_dict"][CLASSIFIER]
        weight += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
        checkpoint["trained_on"] = [*checkpoint["trained_on"], f"somebody of fold {number}"]
        torch.save(checkpoint, run / "checkpoints" / "best.ckpt")
        mark = {"wanted": {}, "run": f"/elsewhere/cv/fold_{number}/run/version_0"}
        (folder / f"fold_{number}" / DONE).write_text(json.dumps(mark))
    row = {"metric": "accuracy", "folds": 3, "mean": 0.8, "sd": 0.05}
    write_table([row | {"vote": 0.9, "vote_low": 0.6, "vote_high": 0.98}], folder / "folds.tsv")
    return folder


def test_predictions_are_the_mean_of_the_networks_with_lowest_and_highest(
    trained, folds, tmp_path, capsys
):
    scans = tmp_path / "scans"
    scans.mkdir()
    for path in scans_of(trained / "new")[:2]:
        shutil.copy(path, scans)
    broken = scans / "000.nii.gz"  # the first one
    broken.write_bytes(b"no scan")
    out = tmp_path / "out"
    assert predict(["--ckpt_path", str(folds), "--scans", str(scans), "--out", str(out)]) == 1
    members = [load(path) for path in checkpoints_of(folds).values()]
    assert len(members) == 3
    rows = {row["scan"]: row for row in read_table(out / "predictions.tsv")}
    assert rows["000"]["lowest_AD"] == ""
    for name, row in rows.items():
        if name == "000":
            continue
        with torch.no_grad():
            scores = [m.network(m.prepare(Path(row["path"]))[0][None]) for m in members]
        raw = [float(s.softmax(dim=1)[0, 1]) for s in scores]
        warm = [float(m.reference.calibrated(s)[0, 1]) for m, s in zip(members, scores)]
        assert max(raw) - min(raw) > 1e-3  # they differ
        assert float(row["p_AD"]) == pytest.approx(np.mean(raw), abs=1e-4)
        assert float(row["calibrated_AD"]) == pytest.approx(np.mean(warm), abs=1e-4)
        ends = float(row["lowest_AD"]), float(row["highest_AD"])
        assert ends == pytest.approx((min(warm), max(warm)), abs=1e-4)
        assert (out / f"{name}_hirescam.png").is_file()
    assert "by the networks)" in capsys.readouterr().out
    page = (out / "predictions.html").read_text()
    assert "3 networks say on average" in page
    assert page.count(" for the first of them") == 2  # training and validation scans


def test_another_cohort_is_tested_with_all_of_them_beside_their_own_test(folds, tmp_path_factory):
    spec = CohortSpec((("AD", 8), ("NC", 8)), 8.0, seed=3, elsewhere=True)
    cohort, out = made(tmp_path_factory, spec), folds / "external" / "elsewhere"
    assert external(["--ckpt_path", str(folds), "--cohort", str(cohort), "--out", str(out)]) == 0
    rows = {row["metric"]: row for row in read_table(out / "internal_and_external.tsv")}
    assert float(rows["accuracy"]["internal"]) == 0.9
    assert float(rows["accuracy"]["internal_low"]) == 0.6
    for name in ("accuracy", "auroc", "brier"):
        low, high = float(rows[name]["networks_from"]), float(rows[name]["networks_to"])
        assert low <= high
    # the mean is no worse than the worst of them: the squared distance is convex
    assert float(rows["brier"]["external"]) <= float(rows["brier"]["networks_to"]) + 1e-4
    assert rows["threshold"]["networks_from"] == ""
    assert "elsewhere: accuracy" in (folds / "model_card.md").read_text()


def test_whoever_one_of_them_was_trained_on_is_no_test(folds):
    together = load_all(folds)
    alone = {one: load(path) for one, path in checkpoints_of(folds).items()}
    for one in alone.values():
        assert one.people < together.people
    assert len(together.members) == 3

    class Known:
        subject, image_id, sha256, picture, path = "x", "I1", "", "none", ""

    from models.transfer import hashed

    checkpoint = torch.load(checkpoints_of(folds)["fold_2"], weights_only=True)
    checkpoint["trained_on"].append(hashed(["x"])[0])
    torch.save(checkpoint, checkpoints_of(folds)["fold_2"])
    with pytest.raises(SplitError, match="LEAK"):
        refuse_trained_on([Known], load_all(folds), folds)


def test_networks_of_other_preparations_are_no_one_model(folds):
    path = checkpoints_of(folds)["fold_1"]
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["ADNIDataModule"]["preprocessing"]["spacing_mm"] = 3.0
    torch.save(checkpoint, path)
    with pytest.raises(UseError, match="differ in task or preparation"):
        load_all(folds)


def test_the_model_card_says_which_networks_it_is_and_how_they_did(folds):
    parts = dict(card_of_folds(folds))
    assert "3 networks" in parts["Model"]
    for number in range(3):
        assert f"fold_{number}/run/version_0/checkpoints/best.ckpt" in parts["Model"]
    tested = parts["Evaluation: the run's own held-out people"]
    assert "accuracy 0.900 (0.600 to 0.980)" in tested
    assert "0.800 +- 0.050" in tested


def test_a_folder_without_runs_and_a_bundle_of_several_are_refused(folds, tmp_path):
    with pytest.raises(UseError, match="no finished runs"):
        load_all(tmp_path / "cv" / "fold_0")
    with pytest.raises(UseError, match="no checkpoint"):
        export(["--ckpt_path", str(folds), "--out", str(tmp_path / "bundle")])
