"""Grad-CAM of held-out scans: the maps, where they peak, and how they meet a known truth."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule
from nibabel.processing import resample_from_to
from torch import Tensor, nn

from models.maps import GradCAM3D

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Explanation:
    """One row of ``explain.tsv``.

    The last three are empty without a truth: whether the peak lies in the planted region, the share
    of the map that does, and the share of the volume that does (what a flat map would score).
    """

    subject: str
    image_id: str
    label: int
    probability: float
    layer: str
    cell_mm: str
    peak_mm: str
    peak_in_truth: bool | None = None
    energy_in_truth: float | None = None
    chance: float | None = None


@dataclass(frozen=True)
class Scan:
    """One held-out scan with its map, both (D, H, W) on the grid of ``affine`` (voxels to mm)."""

    row: Explanation
    image: Array
    heatmap: Array
    truth: Array | None
    affine: Array


def explain_scans(
    model: LightningModule,
    samples: Iterable[dict[str, Any]],
    layer: str,
    truth: Path | None = None,
) -> list[Scan]:
    """Explain the probability of class 1 for each sample.

    Args:
        model: Has a ``network``; stays on its device.
        samples: Each with ``image`` (C, D, H, W), ``affine`` (4, 4), ``label``, ``subject`` and
            ``image_id``.
        layer: Module of the network whose output is explained.
        truth: Folder with one mask per scan, ``<image_id>.nii.gz``; scans without one have none.
    """
    network = model.network
    assert isinstance(network, nn.Module)
    gradcam = GradCAM3D(network, layer)
    scans = []
    for sample in samples:
        image = torch.as_tensor(sample["image"]).to(model.device)[None]
        heatmap = gradcam(image, class_index=1)[0, 0].cpu().numpy()
        affine = np.asarray(sample["affine"], dtype=float)
        mask = _mask(truth, sample["image_id"], heatmap.shape, affine)
        row = Explanation(
            subject=str(sample["subject"]),
            image_id=str(sample["image_id"]),
            label=int(sample["label"]),
            probability=_probability(model, image),
            layer=layer,
            cell_mm=_cell(network, layer, image, affine),
            peak_mm=" ".join(f"{x:.0f}" for x in peak(heatmap, affine)),
            **_scores(heatmap, mask),
        )
        scans.append(Scan(row, image[0, 0].cpu().numpy(), heatmap, mask, affine))
    return scans


def peak(heatmap: Array, affine: Array) -> Array:
    """The hottest point of a map, in mm."""
    index = np.unravel_index(heatmap.argmax(), heatmap.shape)
    return affine[:3, :3] @ index + affine[:3, 3]


def of_both_classes(batches: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first ``count`` samples of a data loader, half of them (or one more) of class 1."""
    wanted = {1: (count + 1) // 2, 0: count // 2}
    chosen: list[dict[str, Any]] = []
    for batch in batches:
        for i, label in enumerate(batch["label"].tolist()):
            if wanted[label] > 0:
                wanted[label] -= 1
                chosen.append({name: values[i] for name, values in batch.items()})
        if not any(wanted.values()):
            break
    return chosen


@torch.no_grad()
def _probability(model: LightningModule, image: Tensor) -> float:
    model.eval()
    return float(model(image).softmax(dim=1)[0, 1])


@torch.no_grad()
def _cell(network: nn.Module, layer: str, image: Tensor, affine: Array) -> str:
    """Size in mm of one voxel of the layer's output: what the map can tell apart."""
    seen: list[torch.Size] = []
    hook = network.get_submodule(layer).register_forward_hook(
        lambda module, args, output: seen.append(output.shape)
    )
    network(image)
    hook.remove()
    voxel_mm = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    cells = voxel_mm * np.array(image.shape[2:]) / np.array(seen[0][2:])
    return " x ".join(f"{side:.0f}" for side in cells)


def _mask(
    folder: Path | None, image_id: Any, shape: tuple[int, ...], affine: Array
) -> Array | None:
    """The planted region of a scan, brought to the grid of the map."""
    path = folder / f"{image_id}.nii.gz" if folder else None
    if path is None or not path.is_file():
        return None
    # nibabel has no types
    mask = resample_from_to(nib.load(path), (shape, affine), order=0)  # type: ignore[no-untyped-call]
    return np.asarray(mask.dataobj) > 0


def _scores(heatmap: Array, mask: Array | None) -> dict[str, Any]:
    if mask is None or not mask.any() or not heatmap.any():
        return {}
    return {
        "peak_in_truth": bool(mask.flat[heatmap.argmax()]),
        "energy_in_truth": float(heatmap[mask].sum() / heatmap.sum()),
        "chance": float(mask.mean()),
    }
