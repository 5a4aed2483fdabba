"""Preparing raw scans. What computes needs SimpleITK: pip install '.[prepare]'."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from datamodules.cli import main
from datamodules.errors import DataError
from datamodules.nifti import BadFile
from datamodules.prepare.cohort import caps_path, find
from datamodules.prepare.itk import simple_itk
from datamodules.prepare.register import Registration
from datamodules.prepare.strip import brain_mask, require
from datamodules.prepare.template import template
from datamodules.records import ScanRecord
from datamodules.sources import Names
from datamodules.synth import CohortSpec, generate
from datamodules.synth.cohort import plan_cohort
from datamodules.synth.generate import render_plan

needs_itk = pytest.mark.skipif(
    find_spec("SimpleITK") is None, reason="SimpleITK is not installed: pip install '.[prepare]'"
)
RAW = CohortSpec(subjects=(("AD", 1), ("NC", 1)), resolution_mm=8.0, difficulty="L2", raw=True)
FINE = replace(RAW, resolution_mm=3.0)
GOOD = Registration(np.eye(4), apart_mm=0.2, correlation=0.9, scales=np.array([0.9, 1.0, 1.1]))


def test_a_raw_scan_knows_where_the_template_lies_in_it():
    """The vertex of the template is where the head of the scan ends."""
    rendered, form = render_plan(RAW, plan_cohort(RAW)[0])
    xyz = form.grid.coordinates()[:, rendered.brain]
    there = rendered.to_template[:, :3] @ xyz + rendered.to_template[:, 3:]
    brain = template(8.0)
    inside = brain.grid.sample(brain.brain.astype(np.float32), there) > 0.5
    assert inside.mean() > 0.9
    middle = xyz.mean(axis=1) - there.mean(axis=1)
    assert np.linalg.norm(middle) > 5  # it was moved
    outside = rendered.image[~rendered.brain]
    assert np.percentile(outside, 95) > 0.3 * np.percentile(rendered.image, 99)  # a face, a scalp


def test_raw_scans_are_of_no_other_difficulty_and_of_no_layout_of_prepared_ones():
    for other in ({"difficulty": "L1"}, {"layout": "caps"}):
        with pytest.raises(DataError, match="BAD_COHORT"):
            replace(RAW, **other)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"apart_mm": 9.0}, "9.0 mm apart"),
        ({"correlation": 0.1}, "correlation 0.10"),
        ({"scales": np.array([0.5, 1.0, 1.1])}, "scaled by 0.50"),
    ],
)
def test_a_registration_that_failed_is_refused_by_a_code(change, what):
    GOOD.refuse_failure()
    with pytest.raises(BadFile, match=what) as caught:
        replace(GOOD, **change).refuse_failure()
    assert caught.value.code == "REGISTRATION"


def test_prepared_files_lie_as_in_caps_and_no_two_scans_become_one(tmp_path):
    record = ScanRecord(subject="999_S_0001", image_id="I1", path="x", session="M012")
    path = caps_path(record, 1.0)
    assert path.parts[:4] == ("subjects", "sub-ADNI999S0001", "ses-M012", "t1_linear")
    assert path.name.endswith("_space-MNI152NLin2009aSym_res-1x1x1_T1w.nii.gz")
    assert "ses-20060424" in caps_path(replace(record, session="", acq_date="2006-04-24"), 1).name


def test_scans_come_from_every_layout_from_loose_files_and_from_one_file(tmp_path):
    generate(tmp_path / "ida", RAW)
    found = find(tmp_path / "ida", None, Names(), tmp_path / "out")
    assert len(found.records) == 2
    assert found.diagnoses is not None
    assert "ADNIMERGE" in found.diagnoses.name
    loose = tmp_path / "loose"
    loose.mkdir()
    for name in ("one.nii.gz", "two.nii.gz"):
        (loose / name).write_bytes(b"x")
    assert [r.subject for r in find(loose, None, Names(), tmp_path / "out").records] == [
        "one",
        "two",
    ]
    assert len(find(loose / "one.nii.gz", None, Names(), tmp_path / "out").records) == 1


def test_a_folder_without_a_scan_to_prepare_says_so(tmp_path, capsys):
    scan = tmp_path / "in" / "sub-01" / "anat" / "sub-01_ce-gad_T1w.nii.gz"
    scan.parent.mkdir(parents=True)
    scan.write_bytes(b"x")
    (tmp_path / "in" / "participants.tsv").write_text("participant_id\tgroup\nsub-01\tNC\n")
    assert main(["prepare", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert "NOTHING_USED: no scan is left to prepare" in capsys.readouterr().err


def test_what_is_not_installed_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=r"NO_TOOL.*mri_synthstrip"):
        require("synthstrip")
    if find_spec("SimpleITK") is None:
        with pytest.raises(DataError, match=r"NO_SIMPLEITK[\s\S]*pip install '\.\[prepare\]'"):
            simple_itk()


def _tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_tool_that_fails_or_finds_no_brain_is_refused_by_a_code(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    values, affine = np.ones((40, 40, 40), np.float32), np.diag([4.0, 4, 4, 1])
    _tool(tmp_path, "mri_synthstrip", "echo no weights here >&2; exit 1")
    with pytest.raises(BadFile, match="no weights here"):
        brain_mask("synthstrip", values, affine)
    _tool(tmp_path, "mri_synthstrip", 'cp "$2" "$4"')  # everything is brain: 4 litres
    with pytest.raises(BadFile, match=r"a brain of 4\.10 l"):
        brain_mask("synthstrip", values, affine)
    values[:13] = 0
    values[20, 20, 20] = 0  # a hole
    found = brain_mask("synthstrip", values[:, :30, :20], affine)
    assert found.sum() == 27 * 30 * 20
    # hd-bet names its mask after the brain
    _tool(tmp_path, "hd-bet", 'cp "$2" "$(dirname "$4")/brain_bet.nii.gz"')
    assert brain_mask("hd-bet", values[:, :30, :20], affine).sum() == found.sum()


@needs_itk
@pytest.mark.conformance
def test_raw_scans_are_registered_within_two_millimetres_and_read_by_the_data_module(
    tmp_path, capsys
):
    generate(tmp_path / "raw", FINE)
    out = tmp_path / "out"
    command = ["prepare", str(tmp_path / "raw"), str(out), "--resolution", "3", "--workers", "1"]
    assert main(command) == 0, capsys.readouterr().out
    with (tmp_path / "raw/truth/truth.tsv").open(newline="") as file:
        truth = {row["image_id"]: row for row in csv.DictReader(file, delimiter="\t")}
    brain = template(4.0).brain_mm()
    for path in out.rglob("*_T1w.json"):
        said = json.loads(path.read_text())
        placed = np.array(truth[said["image_id"]]["to_template"].split(), float)
        true = np.linalg.inv(np.vstack([placed.reshape(3, 4), [0, 0, 0, 1]]))
        gap = np.array(said["template_to_scan_mm"]) - true
        apart = gap[:3, :3] @ brain + gap[:3, 3:]
        assert np.linalg.norm(apart, axis=0).mean() < 2
        image = nib.load(str(path).replace(".json", ".nii.gz"))
        assert image.shape == template(3.0).grid.shape
    again = main(command)
    assert again == 0
    assert "2 of them before" in capsys.readouterr().out
    diagnoses = next((tmp_path / "raw").glob("ADNIMERGE*.csv"))
    check = ["check", str(out), "--out", str(tmp_path / "check")]
    assert main([*check, "--diagnosis-csv", str(diagnoses)]) == 0
    assert "used 2" in capsys.readouterr().out
    assert (out / "quality.html").is_file()
