import nibabel as nib
import numpy as np
import pytest

from datamodules.transforms import fixed_transforms
from models.maps.native import head_mask, masked, to_native


def scan(path, axes: str, shift: float = 0.0):
    """A left-sided spot in a file whose array axes run as named; returns the spot's mm."""
    values = np.zeros((40, 48, 44), np.float32)
    values[8:32, 8:40, 8:36] = 50  # a brain
    values[11:15, 22:26, 20:24] = 200  # left of the middle, in RAS order
    affine = np.diag([4.0, 4, 4, 1])
    affine[:3, 3] = np.array([-80, -100, -90]) + shift
    image = nib.Nifti1Image(values, affine)
    start = nib.io_orientation(affine)
    there = nib.orientations.axcodes2ornt(tuple(axes))
    nib.save(image.as_reoriented(nib.orientations.ornt_transform(start, there)), path)
    return affine[:3, :3] @ np.array([12.5, 23.5, 21.5]) + affine[:3, 3]


@pytest.mark.parametrize("axes", ["RAS", "LAS", "LPI", "PIR"])
@pytest.mark.parametrize("spacing", [4.0, 5.0])
def test_a_map_lies_on_the_scan_it_was_made_from(tmp_path, axes, spacing) -> None:
    path = tmp_path / "scan.nii.gz"
    spot = scan(path, axes, shift=3.0)
    prepared = {"image": str(path)}
    for step in fixed_transforms((36, 44, 40), spacing):
        prepared = step(prepared)
    bright = prepared["image"][0].numpy()
    found = to_native(np.clip(bright, 0, None), prepared["affine"].numpy(), path)
    original = nib.load(path)
    assert found.shape == original.shape
    np.testing.assert_allclose(found.affine, original.affine)
    values = found.get_fdata()
    where = np.argwhere(values > 0.7 * values.max()).mean(axis=0)
    np.testing.assert_allclose(found.affine[:3, :3] @ where + found.affine[:3, 3], spot, atol=2.5)
    # and it is the scan's own bright spot that lies under it
    assert original.get_fdata()[values > 0.9 * values.max()].min() == 200


def test_the_head_is_what_is_not_air_without_holes() -> None:
    image = np.zeros((9, 9, 9))
    image[2:7, 2:7, 2:7] = 1
    image[4, 4, 4] = 0
    assert head_mask(image).sum() == 125
    heatmap = np.full((9, 9, 9), 2.0)
    assert masked(heatmap, image).sum() == 125
    assert not masked(heatmap, np.zeros((9, 9, 9))).any()


def test_a_map_of_a_file_without_orientation_lies_on_the_voxels_it_was_made_from(tmp_path) -> None:
    values = np.zeros((40, 48, 44), np.float32)
    values[8:32, 8:40, 8:36] = 50
    values[11:15, 22:26, 20:24] = 200
    image = nib.Nifti1Image(values, None)
    image.header.set_zooms((4.0, 4.0, 4.0))
    nib.save(image, tmp_path / "scan.nii.gz")
    assert int(nib.load(tmp_path / "scan.nii.gz").header["sform_code"]) == 0
    prepared = {"image": str(tmp_path / "scan.nii.gz")}
    for step in fixed_transforms((36, 44, 40), 4.0):
        prepared = step(prepared)
    bright = np.clip(prepared["image"][0].numpy(), 0, None)
    found = to_native(bright, prepared["affine"].numpy(), tmp_path / "scan.nii.gz").get_fdata()
    assert values[found > 0.9 * found.max()].min() == 200
