"""A wrong image under a right name is seen beside the others; good cohorts are no alarm."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import nilearn
import numpy as np
import pytest
from cohorts import made
from matplotlib.image import imread

from datamodules.checks import check_file
from datamodules.cli import main
from datamodules.labels import TASKS
from datamodules.likeness import Likeness, compare, image, onto, planes
from datamodules.montage import write_montage
from datamodules.nifti import STRICT
from datamodules.survey import Survey, survey
from datamodules.synth import CohortSpec

STRIPPED = CohortSpec((("AD", 8), ("NC", 8)), resolution_mm=4.0)
Volume = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def uncompared() -> None:
    """Not here."""


def sizes(affine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.sqrt((affine[:3, :3] ** 2).sum(axis=0))


def as_lia(values: np.ndarray[Any, Any], affine: np.ndarray[Any, Any]) -> Volume:
    """The array of a file in another order, and a header that knows nothing of it."""
    return values[::-1].transpose(0, 2, 1)[:, ::-1], np.diag([*sizes(affine), 1.0])


def phantom(values: np.ndarray[Any, Any], affine: np.ndarray[Any, Any]) -> Volume:
    """A ball of a little less than a brain, with a bar in it."""
    away = np.indices(values.shape) - (np.array(values.shape)[:, None, None, None] - 1) / 2
    radius = np.sqrt(((away * sizes(affine)[:, None, None, None]) ** 2).sum(axis=0))
    bar = (np.abs(away[0]) < 3) & (np.abs(away[1]) < 3)
    return np.where(radius < 70, 800 - 500 * bar + 10 * np.sin(away.sum(axis=0)), 0), affine


def grey(values: np.ndarray[Any, Any], affine: np.ndarray[Any, Any]) -> Volume:
    """Much where the brain is grey, as a map of grey matter has."""
    bright = np.percentile(values[values > 0], 99)
    return np.exp(-(((values / bright - 0.55) / 0.2) ** 2)) * (values > 0.2 * bright), affine


def inverse(values: np.ndarray[Any, Any], affine: np.ndarray[Any, Any]) -> Volume:
    """Dark where the others are bright, as T2-weighted images are."""
    head = values > 0.1 * np.percentile(values, 99)
    return np.where(head, 1.1 * np.percentile(values, 99.9) - values, 0).clip(0), affine


def larger(factor: float) -> Callable[..., Volume]:
    return lambda values, affine: (values, affine @ np.diag([factor, factor, factor, 1.0]))


WRONG: dict[str, Callable[..., Volume]] = {
    "identity under LIA": as_lia,
    "upside down": lambda v, a: (v[:, :, ::-1], a),
    "front to back": lambda v, a: (v[:, ::-1], a),
    "turned half": lambda v, a: (v[:, ::-1, ::-1], a),
    "axes exchanged": lambda v, a: (v.transpose(1, 0, 2), a),
    "other axes": lambda v, a: (v.transpose(2, 1, 0), a),
    "turned by 90 degrees": lambda v, a: (np.rot90(v, axes=(1, 2)), a),
    "turned the other way": lambda v, a: (np.rot90(v, -1, axes=(0, 1)), a),
    "dimensions exchanged": lambda v, a: (v.reshape(v.shape[1], v.shape[2], v.shape[0]), a),
    "C read as Fortran": lambda v, a: (v.ravel().reshape(v.shape, order="F"), a),
    "phantom": phantom,
    "too small": larger(0.6),
    "too large": larger(1.5),
    "another contrast": inverse,
    "grey matter": grey,
}


def spoilt(path: Path, how: str) -> None:
    """Change a file of a cohort into something else that is a good file."""
    found: Any = nib.as_closest_canonical(nib.load(path))
    values, affine = WRONG[how](np.asarray(found.dataobj, np.float32), found.affine)
    wrong = nib.Nifti1Image(np.ascontiguousarray(values, np.float32), affine)
    wrong.header.set_xyzt_units("mm")
    nib.save(wrong, path)


def look(root: Path, out: Path, **options: Any) -> Survey:
    return survey(root, TASKS["ad_nc"], out / "checks.json", **options)


@pytest.fixture(scope="module")
def stripped(tmp_path_factory) -> Path:
    return made(tmp_path_factory, STRIPPED)


@pytest.fixture(scope="module")
def usual(stripped) -> Likeness:
    found = compare(heads(stripped))
    assert found is not None
    return found


def heads(root: Path) -> dict[str, str]:
    paths = [p for p in sorted((root / "ADNI").rglob("*.nii*")) if "Mask" not in p.name]
    return {str(path): check_file(path).coarse for path in paths}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_no_head_like_the_others_is_far_below_the_bound(stripped, usual, tmp_path, how):
    path = Path(shutil.copy(next(iter(heads(stripped))), tmp_path))
    spoilt(path, how)
    report = check_file(path)
    assert report.code or onto(image(report.coarse), usual.mean)[0] < usual.bound - 0.1


def test_a_wrong_image_is_a_problem_of_its_scan_alone_and_stands_first(stripped, tmp_path, capsys):
    root = Path(shutil.copytree(stripped, tmp_path / "cohort"))
    path = Path(list(heads(root))[5])
    spoilt(path, "upside down")
    out = tmp_path / "out"
    assert main(["check", str(root), "--out", str(out)]) == 1
    assert "bad: 1 x UNLIKE" in capsys.readouterr().out
    found = look(root, out)  # what was compared once is kept
    (problem,) = found.problems
    assert (problem.code, problem.path) == ("UNLIKE", str(path))
    assert "--unlike use" in problem.action
    values = [record.likeness for record in found.records if record.likeness is not None]
    (wrong,) = (record for record in found.records if record.problem)
    assert wrong.likeness == min(values) < 0.5 < sorted(values)[1]
    picture = imread(out / "montage.png")
    assert tuple(picture[4, 20, :3]) == (1, 0, 0)  # framed
    assert not (picture[..., 0] > picture[..., 1] + 0.5)[:, 300:].any()  # and no other one
    used = look(root, out, unlike="use")
    assert not used.problems
    assert [warning.code for warning in used.warnings] == ["UNLIKE"]


@pytest.mark.parametrize("how", ["upside down", "axes exchanged"])
def test_the_majority_is_right_even_where_many_are_wrong_in_one_way(stripped, tmp_path, how):
    scans = heads(stripped)
    wrong = random.Random(0).sample(list(scans), int(0.4 * len(scans)))
    for number, name in enumerate(wrong):
        path = Path(shutil.copy(name, tmp_path / f"{number}{''.join(Path(name).suffixes[-2:])}"))
        spoilt(path, how)
        scans[name] = check_file(path).coarse
    found = compare(scans)
    assert found is not None
    assert {name for name, value in found.values.items() if value < found.bound} == set(wrong)


GOOD = {
    "stripped": STRIPPED,
    "coarse": CohortSpec((("AD", 6), ("NC", 6)), resolution_mm=8.0),
    "another hospital": CohortSpec((("AD", 6), ("NC", 6)), resolution_mm=8.0, elsewhere=True),
    "raw": CohortSpec((("AD", 6), ("NC", 6)), resolution_mm=6.0, difficulty="L2"),
    "intensity alone": CohortSpec((("AD", 6), ("NC", 6)), resolution_mm=8.0, difficulty="L0"),
}


@pytest.mark.parametrize("kind", GOOD)
def test_good_cohorts_are_no_alarm(tmp_path_factory, kind):
    found = compare(heads(made(tmp_path_factory, GOOD[kind])))
    assert found is not None
    assert min(found.values.values()) > found.bound + 0.1


def test_a_head_of_another_study_is_like_them(usual):
    template = "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
    path = Path(nilearn.__file__).parent / "datasets" / "data" / template
    assert onto(image(check_file(path).coarse), usual.mean)[0] > usual.bound + 0.2


def test_a_few_scans_say_nothing_of_each_other(stripped):
    assert compare(dict(list(heads(stripped).items())[:5])) is None


def test_planes_are_upright_and_of_the_middle(stripped):
    sagittal, coronal, axial = planes(check_file(Path(next(iter(heads(stripped))))).planes)
    assert (sagittal.shape, coronal.shape, axial.shape) == ((64, 75), (64, 64), (75, 64))
    rows = (coronal > 40).sum(axis=1)
    assert rows[rows.size // 2 :].sum() > rows[: rows.size // 2].sum()  # a brain is wider above
    mirrored = np.corrcoef(axial.ravel(), axial[:, ::-1].ravel())[0, 1]
    assert mirrored > 0.9


def test_the_montage_is_the_same_for_the_same_scans(stripped, tmp_path):
    records = look(stripped, tmp_path).records
    for name in ("a.png", "b.png"):
        write_montage(tmp_path / name, records, tmp_path / "checks.json", STRICT)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
