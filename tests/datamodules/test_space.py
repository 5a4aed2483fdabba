"""Registered scans lie on one grid, whatever part of their space each file holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from test_adni_datamodule import prepared

from datamodules.labels import TASKS
from datamodules.space import MNI_MIDDLE
from datamodules.survey import survey
from datamodules.synth import CohortSpec, generate

CAPS = CohortSpec((("AD", 4), ("NC", 4)), 6.0, "L2", layout="caps")
CUT = ((2, 1), (1, 0), (0, 2))  # voxels at either end of each axis


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("caps") / "whole"
    generate(root, CAPS)
    return root


def crop(path: Path, ends: tuple[tuple[int, int], ...]) -> None:
    """What ClinicaDL's desc-Crop does: the same voxels, fewer of them."""
    image = nib.load(path)
    cuts = tuple(slice(low, n - high) for n, (low, high) in zip(image.shape, ends))
    cropped = image.slicer[cuts]
    cropped.set_qform(cropped.affine, 1)
    data = cropped.to_bytes()
    path.unlink()
    path.with_name(path.name.removesuffix(".gz")).write_bytes(data)


@pytest.fixture
def half_cropped(whole, tmp_path) -> Path:
    root = Path(shutil.copytree(whole, tmp_path / "half"))
    for path in sorted(root.glob("subjects/*/*/t1_linear/*.nii.gz"))[::2]:
        crop(path, CUT)
    return root


def images(root: Path, cache: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    module = prepared(root, cache, spacing_mm=6.0, spatial_shape=(30, 36, 30))
    items = [item for part in ("train", "val", "test") for item in module.dataset(part)]
    assert module.preprocessing["middle_mm"] == list(MNI_MIDDLE)
    return {item["image_id"]: (item["image"], item["affine"]) for item in items}


@pytest.mark.conformance
def test_cropped_and_whole_files_give_the_same_voxels(whole, half_cropped, tmp_path):
    expected, found = images(whole, tmp_path / "a"), images(half_cropped, tmp_path / "b")
    assert found.keys() == expected.keys()
    places = {str(affine.tolist()) for _, affine in found.values()}
    assert len(places) == 1
    for name, (image, _) in found.items():
        # Otsu's threshold sees less air in a smaller file
        different = (image - expected[name][0]).abs() > 0.05
        assert different.float().mean() < 0.01, name


def test_two_grids_in_one_cohort_are_named_with_their_classes(whole, half_cropped, tmp_path):
    def warned(root: Path) -> list[str]:
        found = survey(root, TASKS["ad_nc"], tmp_path / f"{root.name}.json")
        return [w.detail for w in found.warnings if w.code == "GRIDS"]

    assert warned(whole) == []
    (text,) = warned(half_cropped)
    assert "registered scans on 2 grids: 4 (" in text
    assert "NC" in text


def test_another_space_is_cropped_around_its_own_middle(whole, tmp_path):
    root = Path(shutil.copytree(whole, tmp_path / "elsewhere"))
    for path in root.glob("subjects/*/*/t1_linear/*.nii.gz"):
        image = nib.load(path)
        affine = image.affine.copy()
        affine[:3, 3] += [100, 130, 70]
        moved = nib.Nifti1Image(np.asarray(image.dataobj), affine)
        moved.set_qform(affine, 1)
        nib.save(moved, path)
    module = prepared(root, tmp_path / "cache", spacing_mm=6.0, spatial_shape=(30, 36, 30))
    assert module.preprocessing["middle_mm"] == [100, 112, 92]
    head = module.dataset("train")[0]["image"][0] != 0
    middle = np.argwhere(head.numpy()).mean(axis=0)
    assert np.abs(middle - (np.array([30, 36, 30]) - 1) / 2).max() < 4


def test_stripped_scans_of_a_table_on_two_grids_are_named(tmp_path):
    root = tmp_path / "plain"
    generate(root, CohortSpec((("AD", 2), ("NC", 2)), 6.0, layout="csv"))
    crop(sorted(root.glob("scans/*.nii.gz"))[0], CUT)
    (table,) = root.glob("scans.*")
    kept = next(root.glob("scans/*.nii")).name
    table.write_text(table.read_text().replace(f"{kept}.gz", kept))
    found = survey(root, TASKS["ad_nc"], tmp_path / "checks.json")
    (warning,) = (w for w in found.warnings if w.code == "GRIDS")
    assert "registered: yes" in warning.action
