from __future__ import annotations

import csv
import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from datamodules.cli import main
from datamodules.errors import DataError, FolderError
from datamodules.labels import TASKS
from datamodules.sources.ida import discover
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate
from datamodules.synth.cohort import plan_cohort
from datamodules.synth.courses import COURSES
from datamodules.synth.files import draw_form
from datamodules.synth.generate import render_plan

SMALL = CohortSpec(subjects=(("AD", 1), ("NC", 1)), resolution_mm=8.0, difficulty="L2")
REGISTERED = CohortSpec(subjects=(("AD", 2), ("NC", 2)), resolution_mm=8.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("synthetic") / "small"
    generate(folder, SMALL)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def ill_plan(spec: CohortSpec):
    return next(plan for plan in plan_cohort(spec) if plan.subject.diagnosis == "AD")


@pytest.mark.conformance
def test_same_seed_gives_same_bytes_with_any_number_of_workers(small, tmp_path):
    generate(tmp_path / "two", SMALL, workers=2)
    assert hashes(small) == hashes(tmp_path / "two")


def test_other_seed_gives_other_images(small, tmp_path):
    generate(tmp_path / "two", replace(SMALL, seed=1))
    images = [set(hashes(folder / "ADNI").values()) for folder in (small, tmp_path / "two")]
    assert not images[0] & images[1]


def test_complete_cohort_is_left_alone_and_a_damaged_one_is_made_whole(small, tmp_path):
    shutil.copytree(small, tmp_path / "out")
    before = hashes(small)
    assert generate(tmp_path / "out", SMALL).already_complete
    lost = next((tmp_path / "out" / "ADNI").rglob("*.nii*"))
    lost.rename(lost.with_name(f".{lost.name}.1.part"))
    assert not generate(tmp_path / "out", SMALL).already_complete
    assert hashes(tmp_path / "out") == before


def test_folder_with_other_content_is_refused(small, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FolderError, match=r"NOT_EMPTY.*thesis\.tex"):
        generate(tmp_path, SMALL)
    with pytest.raises(FolderError, match="OTHER_COHORT"):
        generate(small, replace(SMALL, seed=5))


@pytest.mark.parametrize(
    "options",
    [
        {"subjects": (("AD", 0),)},
        {"visits": ("m12",)},
        {"visits": ("bl", "m99")},
        {"resolution_mm": 0.0},
    ],
)
def test_senseless_cohort_is_refused(options):
    with pytest.raises(DataError, match="BAD_COHORT"):
        replace(SMALL, **options)


def test_reader_finds_scans_but_no_truth(tiny_cohort):
    found = discover(tiny_cohort)
    assert found
    assert all("truth" not in file.path.relative_to(tiny_cohort).parts for file in found)
    assert any((tiny_cohort / "truth" / "planted").iterdir())


def test_names_and_table_are_those_of_the_portal(tiny_cohort):
    name = re.compile(
        r"ADNI/(999_S_\d{4,5})/\w+/\d{4}-\d\d-\d\d_\d\d_\d\d_\d\d\.0/(I9\d{6})/"
        r"ADNI_\1_MR_\w+_Br_\d{17}_S\d+_\2\.nii\.gz"
    )
    for path in (tiny_cohort / "ADNI").rglob("*.nii.gz"):
        assert name.fullmatch(path.relative_to(tiny_cohort).as_posix())
    with next(tiny_cohort.glob("SYNTHETIC*.csv")).open() as stream:
        assert ",".join(next(csv.reader(stream))) == (
            "Image Data ID,Subject,Group,Sex,Age,Visit,Modality,Description,Type,Acq Date,Format,"
            "Downloaded,Imaging Protocol"
        )


def test_subject_numbers_do_not_give_the_diagnosis_away():
    plans = plan_cohort(replace(SMALL, subjects=(("AD", 20), ("NC", 20))))
    first_half = [plan.subject.diagnosis for plan in plans[:20]]
    assert 4 < first_half.count("AD") < 16


def test_atrophy_grows_with_severity_and_is_stronger_on_the_left():
    plan = ill_plan(REGISTERED)
    steps = [render_plan(REGISTERED, plan, severity=severity)[0] for severity in (0.0, 0.2, 0.4)]
    left, right = zip(*(step.hippocampus_ml for step in steps))
    ventricles = [step.ventricles_ml for step in steps]
    assert left[0] > left[1] > left[2]
    assert ventricles[0] < ventricles[1] < ventricles[2]
    assert left[0] - left[2] > 1.2 * (right[0] - right[2])


def test_difference_to_the_healthy_twin_lies_in_the_planted_mask():
    plan = ill_plan(REGISTERED)
    ill, twin = render_plan(REGISTERED, plan)[0], render_plan(REGISTERED, plan, severity=0.0)[0]
    both = ill.brain & twin.brain
    difference = np.abs(ill.image - twin.image) * both
    assert difference[ill.planted].sum() > 0.75 * difference.sum()
    assert ill.planted.mean() < 0.03
    assert not twin.planted.any()


def test_easiest_level_changes_the_left_box_only():
    spec = replace(REGISTERED, difficulty="L0")
    ill, form = render_plan(spec, ill_plan(spec))
    x = form.grid.coordinates()[0]
    assert ill.planted.any()
    assert (x[ill.effect > 0] < -10).all()


def test_visits_of_one_subject_are_more_alike_than_two_subjects():
    spec = replace(REGISTERED, difficulty="L2", visits=("bl", "m12"), subjects=(("NC", 8),))
    plans = [plan for plan in plan_cohort(spec) if plan.kind == "t1"]
    first = next(plan for plan in plans if plan.months == 12)
    same = next(p for p in plans if p.subject == first.subject and p.months == 0)
    other = next(p for p in plans if p.subject != first.subject and p.months == 0)
    heads = [_on_common_grid(spec, plan) for plan in (first, same, other)]
    assert np.corrcoef(heads[0], heads[1])[0, 1] > 0.05 + np.corrcoef(heads[0], heads[2])[0, 1]


def _on_common_grid(spec, plan):
    rendered, form = render_plan(spec, plan)
    axis = np.arange(-60.0, 61.0, 4.0)
    points = np.stack(np.meshgrid(axis, axis - 18, axis, indexing="ij")).astype(np.float32)
    return np.log1p(form.grid.sample(rendered.image, points)).ravel()


def test_raw_cohort_varies_in_orientation_spacing_and_storage():
    forms = [draw_form(np.random.default_rng(seed), SMALL, np.zeros(3)) for seed in range(60)]
    assert len({form.orientation for form in forms}) == 6
    assert {form.storage for form in forms} == {"int16", "float32", "scaled"}
    assert len({tuple(form.grid.spacing_mm.round(3)) for form in forms}) >= 4
    assert {form.qform_only for form in forms} == {True, False}


def test_confounded_scanners_tell_the_diagnosis():
    many = replace(SMALL, subjects=(("AD", 10), ("NC", 10)), site_bias=1.0)
    scanners = {(p.subject.diagnosis, p.subject.scanner >= 3) for p in plan_cohort(many)}
    assert scanners == {("AD", False), ("NC", True)}


def test_command_writes_a_cohort_and_then_finds_it_complete(tmp_path, capsys):
    command = ["synth", str(tmp_path / "c"), "--subjects", "2", "--resolution", "8"]
    assert main([*command, "--workers", "1"]) == 0
    assert "written" in capsys.readouterr().out
    assert main(command) == 0
    assert "already complete" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["bids", "caps", "csv"])
def test_other_layouts_hold_the_same_scans_and_are_made_again_byte_for_byte(tmp_path, layout):
    spec = replace(REGISTERED, resolution_mm=10.0, subjects=(("AD", 1), ("NC", 1)))
    for name, one in (("one", layout), ("two", layout), ("download", "ida")):
        generate(tmp_path / name, replace(spec, layout=one))
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    scans = {hash_ for name, hash_ in hashes(tmp_path / "one").items() if ".nii" in name}
    assert scans == {h for name, h in hashes(tmp_path / "download").items() if ".nii" in name}


def test_caps_holds_registered_heads_at_every_level(tmp_path):
    spec = replace(SMALL, layout="caps", resolution_mm=10.0)
    generate(tmp_path / "caps", spec)
    images = [nib.load(path) for path in (tmp_path / "caps" / "subjects").rglob("*.nii.gz")]
    assert len(images) == 2
    assert (images[0].affine == images[1].affine).all()
    assert images[0].shape == images[1].shape
    found = survey(tmp_path / "caps", TASKS["ad_nc"], tmp_path / "checks.json")
    assert [(r.registered, r.stripped) for r in found.records] == [("yes", "no")] * 2


def test_command_writes_any_layout_with_every_course(tmp_path, capsys):
    command = ["synth", str(tmp_path / "c"), "--subjects", "NC=1", "--resolution", "10"]
    assert main([*command, "--layout", "csv", "--courses", "--workers", "1"]) == 0
    assert len((tmp_path / "c" / "scans.csv").read_text().splitlines()) == 1 + 1 + len(COURSES)
