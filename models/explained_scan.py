"""One scan on its way through the methods, with what is known of its change."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from nibabel.processing import resample_from_to

from models.findings import Case, Map, MethodName, Verdict
from models.localisation import localise
from models.maps.native import Array, head_mask, masked

Sample = Mapping[str, Any]


class ExplainedScan:
    """One sample on its way through the methods."""

    def __init__(self, sample: Sample, truth: Path | None, device: torch.device) -> None:
        self.subject, self.image_id = str(sample["subject"]), str(sample["image_id"])
        known = torch.as_tensor(sample["label"])
        self.number = float(known) if known.is_floating_point() else None
        self.label = int(known) if self.number is None else 0
        self.volume = torch.as_tensor(sample["image"]).to(device)[None]
        self.image: Array = self.volume[0, 0].cpu().numpy()
        self.affine: Array = np.asarray(sample["affine"], dtype=float)
        self.voxel_mm: Array = np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0))
        self.head = head_mask(self.image)
        shape = self.image.shape
        mask = _known(truth, self.image_id, shape, self.affine)
        self.truth = None if mask is None else mask > 0
        effects = truth.parent / "effect" if truth else None
        self.effect = _known(effects, self.image_id, shape, self.affine, order=1)

    def map(
        self,
        values: Array,
        method: MethodName,
        explained: int,
        cell_mm: tuple[float, float, float],
    ) -> Map:
        """What a method put out, inside the head and scored."""
        values = masked(values, self.image)
        score = None
        if self.truth is not None and self.label == explained:
            score = localise(values, self.truth, self.head, self.voxel_mm, np.array(cell_mm))
        return Map(method, values, cell_mm, score)

    def case(self, verdict: Verdict, maps: Sequence[Map]) -> Case:
        return Case(
            self.subject,
            self.image_id,
            self.label,
            verdict,
            self.image,
            self.affine,
            self.truth,
            tuple(maps),
            self.number,
        )


def peak_mm(values: Array, affine: Array) -> Array:
    """The hottest point of a map, in mm."""
    index = np.unravel_index(values.argmax(), values.shape)
    found: Array = affine[:3, :3] @ index + affine[:3, 3]
    return found


def _known(
    folder: Path | None, image_id: str, shape: tuple[int, ...], affine: Array, order: int = 0
) -> Array | None:
    """What a folder has on the place of a scan's change, brought to the grid of the map."""
    path = folder / f"{image_id}.nii.gz" if folder else None
    if path is None or not path.is_file():
        return None
    # nibabel has no types
    there = resample_from_to(nib.load(path), (shape, affine), order=order)  # type: ignore[no-untyped-call]
    found: Array = np.asarray(there.dataobj)
    return found if found.any() else None
