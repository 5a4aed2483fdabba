"""Numbers that did not fit into their type are named, however many; scans that fit are not."""

# ruff: noqa: F811 (fixtures of another file)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from test_background import heads  # noqa: F401 (a fixture)

from datamodules.checks import check_file

KINDS = ("raw", "masked", "stripped")
TYPES = {"uint8": 255, "int16": 32767, "uint16": 65535}


def code_of(values: np.ndarray, folder: Path) -> str:
    affine = np.diag([6.0, 6.0, 6.0, 1.0])
    image = nib.Nifti1Image(values, affine)
    image.set_sform(affine, 1)
    nib.save(image, folder / "scan.nii")
    return check_file(folder / "scan.nii").code


@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.01, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_air_at_the_end_of_the_type_is_named(heads, kind, share, tmp_path):
    values = np.rint(np.clip(heads[kind], 0, None)).astype(np.int16)
    air = np.flatnonzero(values < 0.1 * values.max())
    chosen = np.random.default_rng(0).choice(air, max(1, int(share * air.size)), replace=False)
    values.flat[chosen] = 32767
    assert code_of(values, tmp_path) in ("OVERFLOW", "OUTLIER")


def scaled(values: np.ndarray, kind: str, times: float) -> np.ndarray:
    """Whole numbers of which the highest is ``times`` the largest of the type."""
    values = np.clip(values, 0, None)
    return np.rint(values / values.max() * TYPES[kind] * times).astype(np.int64)


@pytest.mark.parametrize("times", [1.1, 1.3, 2, 5, 20])
@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_numbers_are_named(heads, kind, stored, times, tmp_path):
    values = scaled(heads[kind], stored, times).astype(stored)
    assert code_of(values, tmp_path) == "OVERFLOW"
    # saved again as floats they are no better
    assert code_of(values.astype(np.float32), tmp_path) == "OVERFLOW"


@pytest.mark.parametrize("times", [1.6, 3, 8])
def test_a_brain_that_is_saturated_is_named(heads, times, tmp_path):
    values = np.minimum(scaled(heads["stripped"], "uint8", times), 255)
    assert code_of(values.astype(np.uint8), tmp_path) == "OVERFLOW"


SOUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "unsigned bytes": lambda v: scaled(v, "uint8", 1).astype(np.uint8),
    "the whole of a signed type": lambda v: (scaled(v, "uint16", 1) - 32768).astype(np.int16),
    "whole unsigned type": lambda v: scaled(v, "uint16", 1).astype(np.uint16),
    "clipped at 99 %": lambda v: clipped(v, 99),
    "clipped at 99.5 %": lambda v: clipped(v, 99.5),
    "clipped at 99.9 %": lambda v: clipped(v, 99.9),
}


def clipped(values: np.ndarray, percentile: float) -> np.ndarray:
    low, high = np.percentile(values, [100 - percentile, percentile])
    return (np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8)


@pytest.mark.parametrize("how", SOUND)
@pytest.mark.parametrize("kind", KINDS)
def test_scans_that_fill_their_type_are_not_named(heads, kind, how, tmp_path):
    assert code_of(SOUND[how](heads[kind]), tmp_path) == ""


def test_floats_that_nibabel_scales_to_a_type_are_not_named(heads, tmp_path):
    for values in heads.values():
        image = nib.Nifti1Image((values - values.mean()) / values.std(), np.diag([6, 6, 6, 1]))
        image.set_sform(image.affine, 1)
        image.set_data_dtype(np.int16)
        nib.save(image, tmp_path / "scan.nii")
        assert check_file(tmp_path / "scan.nii").code == ""
