"""Raw heads, registered heads and bare brains: told apart, prepared differently, never mixed."""

from __future__ import annotations

import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy import ndimage
from test_adni_datamodule import prepared

from datamodules.errors import DataError, ProblemsError
from datamodules.profiles import choose_profile, is_stripped, refuse_mixture
from datamodules.synth import CohortSpec, generate
from datamodules.transforms import StandardiseHeadd, fixed_transforms


def ball(litres: float, noise: float) -> np.ndarray:
    """A bright ball in 180 x 220 x 180 mm, voxels of 4 mm; ``noise`` in the air."""
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(*(np.arange(n) - n / 2 for n in (45, 55, 45)), indexing="ij"))
    radius = (litres * 1e6 / 64 * 3 / (4 * np.pi)) ** (1 / 3)
    inside = np.linalg.norm(places, axis=0) < radius
    return np.where(inside, rng.normal(900, 60, inside.shape), noise * rng.random(inside.shape))


def test_brains_and_heads_are_told_apart():
    assert is_stripped(ball(1.5, noise=0), 64.0) == "yes"
    assert is_stripped(ball(3.5, noise=0), 64.0) == "no"
    assert is_stripped(ball(3.5, noise=30), 64.0) == "no"
    assert is_stripped(ball(2.6, noise=0), 64.0) == ""


def test_synthetic_scans_are_what_they_are_said_to_be(tiny_cohort, tmp_path):
    module = prepared(tiny_cohort, tmp_path / "cache")
    used = [record for record in module.records if record.used]
    assert {record.stripped for record in used} == {"yes"}
    assert choose_profile("auto", module.records) == "stripped"
    with pytest.raises(DataError, match=r"OTHER_INPUT.*'raw' was asked for.*are stripped"):
        choose_profile("raw", module.records)


def test_a_mixture_is_refused_with_the_odd_one_out(tiny_cohort, tmp_path):
    records = prepared(tiny_cohort, tmp_path / "cache").records
    number = next(i for i, record in enumerate(records) if record.used)
    records[number] = replace(records[number], stripped="no")
    marked, problems = refuse_mixture(records)
    assert [(p.code, p.path) for p in problems] == [("MIXED_INPUT", records[number].path)]
    assert "with skull, like 1 in all, and 22 are without a skull" in problems[0].detail
    assert [r.image_id for r in marked if r.problem] == [records[number].image_id]
    assert choose_profile("auto", marked) == "stripped"
    with pytest.raises(DataError, match="MIXED_INPUT"):
        choose_profile("auto", records)


def test_a_mixed_folder_stops_before_the_first_step(download, tmp_path):
    scan = next(download.glob("ADNI/**/*.nii*"))
    image = nib.load(scan)
    values = np.asarray(image.dataobj, dtype=np.float32)
    noisy = values + 5 + np.random.default_rng(0).random(values.shape)
    nib.save(nib.Nifti1Image(noisy.astype(np.float32), image.affine), scan)
    with pytest.raises(ProblemsError, match="MIXED_INPUT"):
        prepared(download, tmp_path / "cache")
    without = prepared(download, tmp_path / "cache", on_bad="skip")
    assert str(scan) not in {record.path for record in without.records if record.used}


def test_noise_of_the_air_does_not_count_as_head():
    quiet, noisy = (torch.tensor(ball(3.5, noise))[None].float() for noise in (0, 60))
    plain = StandardiseHeadd(["image"])({"image": as_image(quiet)})["image"]
    found = StandardiseHeadd(["image"], noisy_air=True)({"image": as_image(noisy)})["image"]
    inside = quiet > 0
    assert torch.allclose(plain[inside], found[inside], atol=0.02)
    assert (found[~inside] == 0).float().mean() > 0.999


def as_image(values: torch.Tensor) -> torch.Tensor:
    from monai.data import MetaTensor

    return MetaTensor(values)


@pytest.mark.conformance
def test_raw_heads_of_the_hard_level_are_prepared(tmp_path):
    spec = CohortSpec((("AD", 4), ("NC", 4)), resolution_mm=6.0, difficulty="L2")
    generate(tmp_path / "hard", spec)
    module = prepared(tmp_path / "hard", tmp_path / "cache")
    profile = choose_profile("auto", module.records)
    assert profile in ("raw", "stripped")
    image = module.dataset("train")[0]["image"]
    head = image != 0
    assert abs(float(image[head].mean())) < 0.2
    assert float(image.abs().max()) <= 3.0


def shifted(scan, planes: int) -> None:
    """The same head with air below it, as in a field of view that reaches down to the shoulders."""
    image = nib.load(scan)
    ornt = nib.io_orientation(image.affine)
    ras = image.as_reoriented(ornt)
    values = np.asarray(ras.dataobj)
    noise = np.random.default_rng(0).integers(1, 9, (*values.shape[:2], planes)).astype(np.int16)
    tall = np.concatenate([noise, values.astype(np.int16)], axis=2)
    affine = ras.affine.copy()
    affine[:3, 3] -= ras.affine[:3, 2] * planes
    made = nib.Nifti1Image(tall, affine)
    made.set_qform(None, 0)
    nib.save(made, scan)


@pytest.mark.parametrize("planes", [0, 20])
def test_raw_heads_are_centred_whatever_the_field_of_view(raw_heads, tmp_path, planes):
    root = tmp_path / "copy"
    shutil.copytree(raw_heads, root)
    for scan in (root / "ADNI").rglob("*.nii*"):
        if planes and "Mask" not in scan.name:
            shifted(scan, planes)
    shape = (44, 52, 46)  # 4 mm
    for scan in sorted((root / "ADNI").rglob("*.nii*"))[:3]:
        data = {"image": str(scan)}
        for transform in fixed_transforms(shape, 4.0, "raw"):
            data = transform(data)
        head = np.argwhere(data["image"][0].numpy() != 0)
        low, high = np.percentile(head, 1, axis=0), np.percentile(head, 99, axis=0)
        assert np.abs((low + high) / 2 - (np.array(shape) - 1) / 2).max() < 4  # voxels
        # the affine still says where the head lies: the file holds the same picture there
        image = nib.load(scan)
        world = nib.affines.apply_affine(data["affine"].numpy(), head)
        there = nib.affines.apply_affine(np.linalg.inv(image.affine), world)
        on_disk = ndimage.map_coordinates(np.asarray(image.dataobj, float), there.T, order=1)
        assert np.corrcoef(on_disk, data["image"][0].numpy()[tuple(head.T)])[0, 1] > 0.999


def test_a_box_too_small_for_raw_heads_is_a_warning(raw_heads, tmp_path):
    options = {"spacing_mm": 4.0, "val_fraction": 0.5, "test_fraction": 0.0}
    for shape, cut in (((46, 56, 46), False), ((40, 40, 40), True)):
        made = prepared(raw_heads, tmp_path / "cache", spatial_shape=shape, **options)
        text = (made.state_dir / "problems.tsv").read_text()
        assert ("head cut off by spatial_shape" in text) is cut


def test_class_weights_make_classes_count_alike(tiny_cohort, tmp_path):
    module = prepared(tiny_cohort, tmp_path / "cache")
    labels = [record.label for record in module.scans("train")]
    weights = module.class_weights
    totals = [weights[label] * labels.count(label) for label in (0, 1)]
    assert totals[0] == pytest.approx(totals[1])
    assert sum(weights[label] for label in labels) == pytest.approx(len(labels))
