import nibabel as nib
import numpy as np
import pytest
import torch

from models import ResAttNetClassifier
from models.explain import explain_scans, of_both_classes
from models.overlay import save_overlay

AFFINE = torch.diag(torch.tensor([4.0, 4, 4, 1], dtype=torch.float64))
AFFINE[:3, 3] = -60


@pytest.fixture(scope="module")
def model() -> ResAttNetClassifier:
    torch.manual_seed(0)
    return ResAttNetClassifier()


def batch(labels: list[int]) -> dict:
    ids = [f"999_S_{i:04d}" for i in range(len(labels))]
    return {
        "image": torch.rand(len(labels), 1, 32, 32, 32),
        "label": torch.tensor(labels),
        "affine": AFFINE.expand(len(labels), 4, 4),
        "subject": ids,
        "image_id": [f"I{9_000_000 + i}" for i in range(len(labels))],
    }


def plant(folder, image_id: str, affine: np.ndarray, shape=(32, 32, 32)) -> None:
    mask = np.zeros(shape, np.uint8)
    mask[: shape[0] // 2] = 1
    nib.save(nib.Nifti1Image(mask, affine), folder / f"{image_id}.nii.gz")


def test_takes_both_classes_and_stops_reading() -> None:
    batches = iter([batch([0, 0, 0]), batch([1, 0, 1]), batch([1])])
    chosen = of_both_classes(batches, 3)
    assert sorted(int(sample["label"]) for sample in chosen) == [0, 1, 1]
    assert len(list(batches)) == 1


def test_reports_what_the_layer_can_tell_apart(model) -> None:
    [scan] = explain_scans(model, of_both_classes([batch([1])], 1), "layer3")
    assert scan.row.cell_mm == "64 x 64 x 64"  # 32 voxels of 4 mm in 2 cells
    assert (scan.row.subject, scan.row.image_id) == ("999_S_0000", "I9000000")
    assert 0 <= scan.row.probability <= 1
    assert scan.row.energy_in_truth is None
    assert scan.heatmap.shape == scan.image.shape == (32, 32, 32)


def test_scores_against_a_truth_on_another_grid(model, tmp_path) -> None:
    finer = np.diag([2.0, 2, 2, 1])
    finer[:3, 3] = -61  # voxel borders, not centres, of both grids meet
    plant(tmp_path, "I9000000", finer, shape=(64, 64, 64))
    [scan] = explain_scans(model, of_both_classes([batch([1])], 1), "layer3", tmp_path)
    assert scan.row.chance == pytest.approx(0.5)
    half = scan.heatmap[:16].sum() / scan.heatmap.sum()
    assert scan.row.energy_in_truth == pytest.approx(half)
    assert scan.row.peak_in_truth == (np.unravel_index(scan.heatmap.argmax(), (32,) * 3)[0] < 16)


@pytest.mark.parametrize("flat", [False, True])
def test_an_overlay_is_a_picture_even_of_an_empty_map(model, tmp_path, flat) -> None:
    plant(tmp_path, "I9000000", AFFINE.numpy())
    [scan] = explain_scans(model, of_both_classes([batch([1])], 1), "layer3", tmp_path)
    if flat:
        scan.heatmap[:] = 0
    save_overlay(scan, tmp_path / "a.png", ("NC", "AD"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
