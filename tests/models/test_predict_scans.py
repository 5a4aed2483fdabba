"""Scans that nobody has labelled: one file, a folder with bad ones, a table, refusals by name."""

import csv
import gzip
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from datamodules.checks import FileReport, check_file
from datamodules.likeness import compare
from datamodules.nifti import STRICT, BadFile
from datamodules.synth import CohortSpec, generate
from models.cli import main
from models.commands.new_scans import find_scans
from models.commands.predict_scans import _refuse_other_kind, answer, load
from models.commands.predict_scans import main as predict_main
from models.errors import UseError
from models.reference import Reference, temperature, threshold, to_checkpoint
from models.transfer import hashed, is_among

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")]


def scans_of(root: Path) -> list[Path]:
    return sorted(p for p in (root / "ADNI").rglob("*.nii.gz") if "Mask" not in p.name)


def predict(monkeypatch, trained: Path, what: Path, out: Path) -> tuple[int, list[dict[str, str]]]:
    arguments = ["predict", "--ckpt_path", str(trained / "best.ckpt"), "--scans", str(what)]
    monkeypatch.setattr("sys.argv", ["models", *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    with (out / "predictions.tsv").open(newline="") as file:
        return ended.value.code, list(csv.DictReader(file, delimiter="\t"))


def test_one_file_gives_a_row_an_overlay_a_map_and_a_page(trained, tmp_path, monkeypatch):
    path = scans_of(trained / "new")[0]
    code, (row,) = predict(monkeypatch, trained, path, tmp_path / "out")
    assert code == 0
    assert float(row["p_NC"]) + float(row["p_AD"]) == pytest.approx(1, abs=1e-3)
    assert float(row["calibrated_NC"]) + float(row["calibrated_AD"]) == pytest.approx(1, abs=1e-3)
    name = row["scan"]
    native = nib.load(tmp_path / "out" / f"{name}_hirescam.nii.gz")
    assert native.shape == nib.load(path).shape
    assert np.allclose(native.affine, nib.load(path).affine)
    assert (tmp_path / "out" / f"{name}_hirescam.png").stat().st_size > 10_000
    page = (tmp_path / "out" / "predictions.html").read_text()
    assert all(word in page for word in (name, "Not a diagnosis", "data:image/png;base64"))


def test_the_same_numbers_as_the_model_gives_for_the_prepared_scan(trained, tmp_path, monkeypatch):
    path = scans_of(trained / "new")[1]
    _, (row,) = predict(monkeypatch, trained, path, tmp_path / "out")
    own = load(trained / "best.ckpt")
    with torch.no_grad():
        expected = own.network(own.prepare(path)[0][None]).softmax(dim=1)[0]
    assert [float(row["p_NC"]), float(row["p_AD"])] == pytest.approx(expected.tolist(), abs=1e-4)


def test_maps_of_an_earlier_run_are_no_scans(trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "scans"
    folder.mkdir()
    path = Path(shutil.copy(scans_of(trained / "new")[0], folder / "P7.nii.gz"))
    predict(monkeypatch, trained, path, folder / "said")
    assert [scan.path for scan in find_scans(folder)] == [path]
    assert "1 files below" in capsys.readouterr().out
    (found,) = (folder / "said").glob("*.nii.gz")
    assert check_file(found).code == "MAP"


def test_a_head_that_is_not_like_those_trained_on_is_refused_unless_it_is_wanted(trained, tmp_path):
    checkpoint = shutil.copy(trained / "best.ckpt", tmp_path / "known.ckpt")
    found = compare({str(p): check_file(p).coarse for p in scans_of(trained / "adni")})
    before = load(Path(checkpoint)).reference
    usual = torch.tensor(found.mean).float()
    to_checkpoint(Path(checkpoint), replace(before, usual=usual, least=found.bound))
    own = load(Path(checkpoint))
    good = scans_of(trained / "new")[0]
    image = nib.as_closest_canonical(nib.load(good))
    turned = nib.Nifti1Image(np.asarray(image.dataobj)[:, :, ::-1], image.affine)
    turned.header.set_xyzt_units("mm")
    wrong = tmp_path / "wrong.nii.gz"
    nib.save(turned, wrong)
    said = answer(own, find_scans(good)[0], tmp_path, STRICT)
    assert (said.problem, said.likeness > found.bound) == ("", True)
    refused = answer(own, find_scans(wrong)[0], tmp_path, STRICT)
    assert refused.problem.startswith("UNLIKE: no head like those that were trained on")
    assert not refused.outputs
    used = answer(own, find_scans(wrong)[0], tmp_path, STRICT, unlike="use")
    assert used.outputs
    assert any(note.startswith("UNLIKE") for note in used.notes)


def test_a_person_is_known_under_every_spelling_and_by_older_checkpoints():
    people = hashed(["P001", "999_S_0001", "M\u00fcller"])
    for name in ("p-1", "P 001", "999-S-1", "Mu\u0308ller", "MULLER"):
        assert is_among(name, people)
    assert not is_among("P0011", people)
    assert is_among("P_1", [hashlib.sha256(b"P_1").hexdigest()[:16]])


@pytest.mark.conformance
def test_bad_scans_say_why_and_do_not_end_the_others(trained, tmp_path, monkeypatch):
    folder = tmp_path / "scans"
    folder.mkdir()
    for number, path in enumerate(scans_of(trained / "new")[:4]):
        shutil.copy(path, folder / f"scan_{number}.nii.gz")
    cut = folder / "scan_1.nii.gz"
    cut.write_bytes(cut.read_bytes()[:-300])
    (folder / "scan_2.nii.gz").write_bytes(gzip.compress(b"<!DOCTYPE html>" * 50))
    generate(tmp_path / "raw", CohortSpec((("NC", 1),), 8.0, "L2"), workers=1)
    raw = next(p for p in (tmp_path / "raw/ADNI").rglob("*.nii*"))
    shutil.copy(raw, folder / f"scan_3{'.nii.gz' if raw.suffix == '.gz' else '.nii'}")
    code, rows = predict(monkeypatch, trained, folder, tmp_path / "out")
    assert code == 1
    said = {row["scan"]: row["problem"].partition(":")[0] for row in rows}
    assert said["scan_1"] == "CORRUPT_GZIP"
    assert said["scan_2"] == "NOT_NIFTI"
    assert "OTHER_INPUT" in {row["problem"].partition(":")[0] for row in rows}
    assert sum(not row["problem"] for row in rows) == len(rows) - 3
    assert "CORRUPT_GZIP" in (tmp_path / "out" / "predictions.html").read_text()


@pytest.mark.conformance
def test_a_table_says_who_it_is_and_what_is_out_of_range(trained, tmp_path, monkeypatch):
    first, second = scans_of(trained / "new")[:2]
    table = tmp_path / "scans.csv"
    table.write_text(
        "path,subject,age,field_strength\n"
        f"{first},old,109,7\n{second},usual,75,3\n{scans_of(trained / 'adni')[0]},same,75,3\n"
    )
    code, (odd, usual, _) = predict(monkeypatch, trained, table, tmp_path / "out")
    assert code == 0
    assert odd["subject"] == "old"
    assert "age: 109, trained on" in odd["outside"]
    assert "field_strength: 7 T, trained on" in odd["outside"]
    assert "age" not in usual["outside"]
    assert "intensity_p" not in (tmp_path / "out/predictions.html").read_text()  # but in words


@pytest.mark.conformance
def test_scans_and_people_that_were_trained_on_are_told(trained, tmp_path, monkeypatch):
    from models.transfer import hashed, read_checkpoint

    people = set(read_checkpoint(trained / "best.ckpt")["trained_on"])
    mine = [p for p in scans_of(trained / "adni") if hashed([p.parents[3].name])[0] in people]
    renamed = tmp_path / "somebody.nii.gz"
    renamed.write_bytes(gzip.compress(gzip.decompress(mine[0].read_bytes()), 1))
    _, (row,) = predict(monkeypatch, trained, renamed, tmp_path / "out")
    assert "TRAINED_ON: the network has seen this scan" in row["notes"]
    _, (row,) = predict(monkeypatch, trained, scans_of(trained / "new")[0], tmp_path / "other")
    assert "TRAINED_ON" not in row["notes"]


def test_a_checkpoint_that_knows_nothing_of_its_scans_is_refused(trained, tmp_path):
    state = torch.load(trained / "best.ckpt", weights_only=True)
    del state["ADNIDataModule"]
    torch.save(state, tmp_path / "old.ckpt")
    with pytest.raises(UseError, match="does not know how its scans were prepared"):
        load(tmp_path / "old.ckpt")


def test_a_scan_of_another_space_is_refused_where_registered_ones_were_trained_on():
    registered = {"profile": "registered", "middle_mm": [0.0, -18.0, 18.0]}
    _refuse_other_kind(registered, FileReport(stripped="no", middle_mm="1 -16 11"))
    with pytest.raises(BadFile, match=r"OTHER_INPUT.*77 mm"):
        _refuse_other_kind(registered, FileReport(stripped="no", middle_mm="0 -18 95"))
    with pytest.raises(BadFile, match=r"brains without skull.*trained on heads with"):
        _refuse_other_kind(registered, FileReport(stripped="yes", middle_mm="0 -18 18"))


def test_files_are_named_after_as_few_folders_as_tell_them_apart(tmp_path):
    deep = "a_long_name_of_a_series" * 4
    for path in ("P1/v1/t1.nii", "P1/v2/t1.nii", "P2/v1/t1.nii", f"{deep}/{deep}/{deep}/P3.nii"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    names = [scan.name for scan in find_scans(tmp_path)]
    assert sorted(names) == ["P1_v1_t1", "P2_v1_t1", "P3", "v2_t1"]


def test_files_of_one_name_in_two_folders_have_two_names(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t1.nii").touch()
    assert [scan.name for scan in find_scans(tmp_path)] == ["a_t1", "b_t1"]
    (tmp_path / "a" / "t1.nii").unlink()
    with pytest.raises(UseError, match=r"no \.nii"):
        find_scans(tmp_path / "a")


def test_temperature_recovers_what_the_scores_were_multiplied_with():
    random = np.random.default_rng(0)
    logits = random.normal(0, 1.5, 4000)
    labels = torch.tensor(random.random(4000) < 1 / (1 + np.exp(-logits))).long()
    scores = torch.tensor(np.stack([np.zeros(4000), 3 * logits], axis=1))
    assert temperature(scores, labels) == pytest.approx(3, rel=0.1)
    sure = torch.tensor([[5.0, -5.0], [-5.0, 5.0]] * 5)
    assert temperature(sure, torch.tensor([0, 1] * 5)) > 2  # ten right ones are no certainty


def test_the_threshold_is_youdens_and_the_nearest_to_a_half():
    positive = torch.tensor([0.05, 0.1, 0.2, 0.3, 0.15, 0.25, 0.28, 0.4])
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert threshold(positive, labels) == pytest.approx(0.225)  # 3 of 4 and 3 of 4
    apart = threshold(torch.tensor([0.1, 0.2, 0.7, 0.9]), torch.tensor([0, 0, 1, 1]))
    assert apart == pytest.approx(0.45)


def test_distance_grows_with_the_departure_from_the_training_scans():
    features = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    precision = torch.linalg.inv(torch.cov(features.T))
    own = Reference(("a", "b"), {}, {}, (), 1.0, 0, 0.5, features.mean(dim=0), precision, 3.0)
    distances = [own.distance(own.centre + step) for step in (0.0, 1.0, 4.0)]
    assert distances == sorted(distances)
    assert distances[0] == 0


@pytest.mark.parametrize(
    ("name", "person"),
    [
        ("ADNI_999_S_0001_MR_MT1__GradWarp__N3m_Br_20060424_S1_I9000001", "999_S_0001"),
        ("sub-ADNI999S0001_ses-M000_space-MNI_T1w", "999_S_0001"),
        ("sub-01_T1w", "01"),
        ("OAS1_0001_MR1", "OAS1_0001"),
        ("scan", "scan"),
    ],
)
def test_a_person_is_known_by_the_name_that_studies_give_a_file(tmp_path, name, person):
    (tmp_path / f"{name}.nii.gz").touch()
    (tmp_path / "scans.csv").write_text(f"path\n{name}.nii.gz\n")
    for given in (tmp_path, tmp_path / f"{name}.nii.gz", tmp_path / "scans.csv"):
        assert [scan.subject for scan in find_scans(given)] == [person]


def test_a_layer_that_is_not_there_is_refused_before_any_scan(trained, tmp_path):
    scan = str(scans_of(trained / "new")[0])
    arguments = ["--ckpt_path", str(trained / "best.ckpt"), "--scans", scan, "--layer", "layer5"]
    with pytest.raises(UseError, match=r"--layer: .*no layer 'layer5'; close to it: .*layer4"):
        predict_main([*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out" / "predictions.tsv").exists()
