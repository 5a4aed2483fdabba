"""Lists of final classes, sessions that name no month, series by name, and nothing left to use."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from test_file_checks import AFFINE, VOLUME, image

from datamodules.checks import check_file
from datamodules.cli import main
from datamodules.labels import TASKS
from datamodules.series import is_t1
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate

PEOPLE = CohortSpec(
    (("AD", 2), ("NC", 2), ("sMCI", 3), ("pMCI", 3)), 8.0, visits=("bl", "m12"), layout="bids"
)


@pytest.fixture(scope="module")
def bids(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bids") / "cohort"
    generate(root, PEOPLE)
    return root


def listed(bids: Path, folder: Path, words: dict[str, str], column: str = "") -> Path:
    """A list as ClinicaDL writes it: participant, session, and a class for each session."""
    truth = (bids / "truth/truth.tsv").read_text().splitlines()
    head = truth[0].split("\t")
    rows = [dict(zip(head, line.split("\t"))) for line in truth[1:]]
    lines = ["participant_id\tsession_id\tdiagnosis" + (f"\t{column}" if column else "")]
    for row in rows:
        if row["diagnosis"] in words:
            name = "sub-ADNI" + row["subject"].replace("_", "")
            session = {"bl": "ses-M000", "m12": "ses-M012"}[row["visit"]]
            lines.append(f"{name}\t{session}\t{words[row['diagnosis']]}")
    path = folder / "list.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("words", "column"),
    [({"sMCI": "sMCI", "pMCI": "pMCI"}, ""), ({"sMCI": "MCI\ts", "pMCI": "MCI\tp"}, "progression")],
)
def test_final_classes_are_used_as_they_are(bids, tmp_path, words, column):
    table = listed(bids, tmp_path, words, column)
    found = survey(bids, TASKS["pmci_smci"], None, diagnosis_csv=table)
    used = [record for record in found.records if record.used]
    assert "final classes" in found.labels
    assert len(used) == len(table.read_text().splitlines()) - 1
    truth = (bids / "truth/truth.tsv").read_text()
    for record in used:
        assert f"{record.subject}\t{record.image_id}\t{record.dx}" in truth


def test_reverted_and_unknown_conclusions_have_no_class(bids, tmp_path):
    table = listed(bids, tmp_path, {"sMCI": "rMCI", "pMCI": "ukMCI", "AD": "AD", "NC": "CN"})
    found = survey(bids, TASKS["three_way"], None, diagnosis_csv=table).records
    reasons = {record.reason for record in found}
    assert reasons == {"", "reverted", "unstable"}


def without_months(bids: Path, to: Path) -> Path:
    """The same people with sessions 1 and 2, and neither dates nor months anywhere."""
    shutil.copytree(bids, to)
    names = {"ses-M000": "ses-1", "ses-M012": "ses-2"}
    for path in sorted(to.rglob("*"), key=lambda p: -len(p.parts)):
        new = path.name
        for old, other in names.items():
            new = new.replace(old, other)
        if new != path.name:
            path.rename(path.with_name(new))
    for table in to.rglob("*.tsv"):
        lines = []
        for line in table.read_text().splitlines():
            for old, other in names.items():
                line = line.replace(old, other)
            lines.append(line)
        if table.name.endswith("_sessions.tsv"):
            head = lines[0].split("\t")
            keep = [i for i, name in enumerate(head) if name != "examination_date"]
            cells = [line.split("\t") for line in lines]
            lines = ["\t".join(row[i] for i in keep) for row in cells if "ses-M" not in row[0]]
        table.write_text("\n".join(lines) + "\n")
    return to


def test_sessions_that_name_no_month_have_their_diagnoses(bids, tmp_path):
    root = without_months(bids, tmp_path / "plain")
    plain = survey(root, TASKS["ad_nc"], None)
    used = {(r.subject, r.dx) for r in plain.records if r.used}
    there = {(r.subject, r.dx) for r in survey(bids, TASKS["ad_nc"], None).records if r.used}
    assert {pair for pair in there if pair[1] == "NC"} <= used
    assert {r.session for r in plain.records if r.used} == {"1", "2"}
    mci = survey(root, TASKS["pmci_smci"], None).records
    assert not any(record.used for record in mci)
    assert "no_dates" in {record.reason for record in mci}


TAKEN = [
    "MPR; GradWarp; B1 Correction; N3; Scaled",
    "MT1; GradWarp; N3m",
    "Accelerated Sagittal MPRAGE",
    "MP-RAGE REPEAT",
    "IR-FSPGR",
    "SAG 3D BRAVO",
    "T1 TFE",
    "T1W_3D_TFE SENSE",
    "3D T1 FFE",
    "MP2RAGE_UNI-DEN",
    "T1w",
    "sT1W_3D",
]
LEFT = [
    "MPRAGE phase image",
    "MPRAGE_Pha",
    "MPRAGE +C",
    "T1 MPRAGE post GAD",
    "MPRAGE Gadolinium",
    "MPRAGE KM",
    "AX T1 SE",
    "T1 TSE SAG",
    "T2 TFE",
    "3D T2 SPGR",
    "FLAIR",
    "MP2RAGE_UNI",
    "MP2RAGE_INV1",
    "PD/T2 TSE",
    "MPR; GradWarp; B1 Correction; Mask",
    "Accelerated_Sagittal_MPRAGE_ND",
    "Field_mapping",
    "Axial T2 FSE",
]


@pytest.mark.parametrize("name", TAKEN)
def test_series_that_are_taken(name):
    assert is_t1(name)


@pytest.mark.parametrize("name", LEFT)
def test_series_that_are_not_taken(name):
    assert not is_t1(name)


def test_parts_of_a_complex_image_and_agents_are_left_out_of_bids(bids, tmp_path):
    root = tmp_path / "cohort"
    shutil.copytree(bids, root)
    scan = sorted(root.glob("sub-*/ses-M000/anat/*_T1w.nii.gz"))[0]
    for entity in ("part-phase", "ce-gadolinium"):
        shutil.copy(scan, scan.with_name(scan.name.replace("_T1w", f"_{entity}_T1w")))
    found = survey(root, TASKS["ad_nc"], None).records
    assert [r.reason for r in found if "part-" in r.path or "ce-" in r.path] == ["not_t1"] * 2


@pytest.mark.parametrize("command", ["check", "manifest", "split"])
def test_nothing_to_train_on_is_no_success(bids, tmp_path, capsys, command):
    table = listed(bids, tmp_path, {"sMCI": "sMCI"})
    out = {"check": "out", "manifest": "m.tsv", "split": "s.json"}[command]
    options = ["--task", "ad_nc", "--diagnosis-csv", str(table), "--out", str(tmp_path / out)]
    assert main([command, str(bids), *options]) == 1
    said = capsys.readouterr().err
    assert "NOTHING_USED: none of " in said
    assert ": missing" in said
    assert "--diagnosis-csv" in said


@pytest.mark.parametrize("factor", [1000, 1e6, 1e-3])
def test_an_affine_in_other_units_is_refused_by_the_check(tmp_path, factor):
    path = tmp_path / "scan.nii"
    path.write_bytes(image(VOLUME, np.diag([*(AFFINE.diagonal()[:3] * factor), 1])).to_bytes())
    report = check_file(path)
    assert report.code == "BAD_UNITS"
    assert ("micrometres" if factor > 1 else "metres") in report.detail


def test_a_header_that_says_micrometres_is_refused(tmp_path):
    made = image()
    made.header.set_xyzt_units("micron")
    (tmp_path / "scan.nii").write_bytes(made.to_bytes())
    assert "the header says micron" in check_file(tmp_path / "scan.nii").detail
