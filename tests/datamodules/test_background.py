"""Scans in any unit: the background is found, and what is prepared does not depend on the unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import nilearn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from datamodules.checks import check_file
from datamodules.profiles import Profile
from datamodules.synth import CohortSpec
from datamodules.synth.cohort import plan_cohort
from datamodules.synth.generate import render_plan
from datamodules.transforms import fixed_transforms

AFFINE = np.diag([6.0, 6.0, 6.0, 1.0])
SHAPE = (30, 36, 30)


@pytest.fixture(scope="module")
def heads() -> dict[str, np.ndarray]:
    """A head in air with noise, one in nothing, and a brain, from the synthetic cohort."""
    found = {}
    for name, difficulty in (("raw", "L2"), ("stripped", "L1")):
        spec = CohortSpec((("AD", 1),), 6.0, difficulty)
        found[name] = render_plan(spec, plan_cohort(spec)[0])[0].image
    head = ndimage.binary_fill_holes(found["raw"] > 0.1 * found["raw"].max())
    found["masked"] = np.where(head, found["raw"], 0)
    return found


PROFILES: dict[str, Profile] = {"raw": "raw", "masked": "raw", "stripped": "stripped"}


def saved(folder: Path, values: np.ndarray) -> Path:
    image = nib.Nifti1Image(values.astype(np.float32), AFFINE)
    image.set_sform(AFFINE, 1)
    nib.save(image, folder / "scan.nii")
    return folder / "scan.nii"


def prepared(path: Path, profile: Profile) -> np.ndarray:
    data = {"image": str(path)}
    for transform in fixed_transforms(SHAPE, 6.0, profile):
        data = transform(data)
    return data["image"][0].numpy()


@pytest.mark.parametrize("kind", PROFILES)
def test_scale_and_offset_change_nothing(heads, kind, tmp_path):
    plain = prepared(saved(tmp_path, heads[kind]), PROFILES[kind])
    assert (plain != 0).mean() > 0.1

    @settings(max_examples=12)
    @given(st.floats(-4, 4), st.floats(-5, 5))
    def scaled(power: float, offset: float) -> None:
        top = heads[kind].max()
        other = 10.0**power * (heads[kind] + offset * top)
        again = prepared(saved(tmp_path, other), PROFILES[kind])
        # a voxel at the threshold may fall to either side of it in single precision
        assert (np.abs(plain - again) > 5e-3).mean() < 1e-3

    scaled()


def z_scored(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std()


def z_scored_head(values: np.ndarray) -> np.ndarray:
    """Mean 0 within the head, which is what most tools write; the background stays 0."""
    head = values > 0
    scaled = (values - values[head].mean()) / values[head].std()
    return np.where(head, scaled, 0)


def minus_one_to_one(values: np.ndarray) -> np.ndarray:
    return 2 * values / values.max() - 1


def padded_far_below(values: np.ndarray) -> np.ndarray:
    wide = np.pad(values, 6, constant_values=-32768)
    return wide[3:-3, 3:-3, 3:-3]


UNITS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "whole volume to mean 0": ("raw", z_scored),
    "brain volume to mean 0": ("stripped", z_scored),
    "head to mean 0": ("masked", z_scored_head),
    "brain to mean 0": ("stripped", z_scored_head),
    "raw from -1 to 1": ("raw", minus_one_to_one),
    "masked from -1 to 1": ("masked", minus_one_to_one),
    "brain from -1 to 1": ("stripped", minus_one_to_one),
    "offset": ("raw", lambda v: v + 1000),
    "padding far below": ("raw", padded_far_below),
}


@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_named_and_prepared_like_the_plain_scan(heads, name, tmp_path):
    kind, change = UNITS[name]
    path = saved(tmp_path, heads[kind])
    plain, said = prepared(path, PROFILES[kind]), check_file(path)
    path = saved(tmp_path, change(heads[kind]))
    report = check_file(path)
    assert report.code == ""
    assert "background" in report.warnings["BACKGROUND"]
    assert "BACKGROUND" not in said.warnings
    assert report.stripped == said.stripped
    again = prepared(path, PROFILES[kind])
    if name != "padding far below":  # which moves the middle, not the head
        assert np.corrcoef(plain.ravel(), again.ravel())[0, 1] > 0.97
    assert (again != 0).mean() == pytest.approx((plain != 0).mean(), rel=0.08)


@pytest.mark.parametrize("kind", PROFILES)
def test_a_negative_slope_is_called_what_it_is(heads, kind, tmp_path):
    for slope, offset in ((-1, 0), (-0.37, 5000)):
        report = check_file(saved(tmp_path, slope * heads[kind] + offset))
        assert (report.code, "slope" in report.action) == ("INVERTED", True)


def test_a_piece_of_a_head_is_named_the_less_air_the_louder(heads, tmp_path):
    codes = []
    for cut in (0.0, 0.25, 0.3):
        cuts = tuple(slice(int(cut * n), n - int(cut * n)) for n in heads["raw"].shape)
        piece = heads["raw"][cuts]
        report = check_file(saved(tmp_path, piece))
        codes.append(report.code or "".join(report.warnings.keys() - {"GEOMETRY"}))
    assert codes == ["", "BACKGROUND", "NO_BACKGROUND"]


def test_scans_as_they_come_are_not_named(heads, tmp_path):
    for values in heads.values():
        report = check_file(saved(tmp_path, values))
        assert (report.code, dict(report.warnings).keys() - {"GEOMETRY"}) == ("", set())


def test_sample_files_of_nibabel_and_nilearn_are_not_refused():
    small = Path(nib.__file__).parent / "tests/data"
    part = check_file(small / "anatomical.nii")  # 66 x 82 x 50 mm of a head
    assert not part.code
    assert set(part.warnings) == {"GEOMETRY", "BACKGROUND"}
    coarse = check_file(small / "reoriented_anat_moved.nii")
    assert not coarse.code
    assert set(coarse.warnings) == {"GEOMETRY"}
    template = "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
    whole = check_file(Path(nilearn.__file__).parent / template)
    assert not whole.code
    assert not whole.warnings
