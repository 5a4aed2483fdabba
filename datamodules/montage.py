"""A picture of a batch: each scan as it lies on disk, prepared, and varied for training."""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from .atomic import write_atomically
from .cache import Item, ScanDataset
from .profiles import choose_profile
from .records import ScanRecord
from .seeding import Draws
from .transforms import SHAPE, SPACING_MM, fixed_transforms, random_transforms

Array = np.ndarray[Any, Any]
_PLANES = ("sagittal", "coronal", "axial")
_INCHES = 1.5


def write_montage(path: Path, records: Sequence[ScanRecord], count: int = 6) -> None:
    """Draw the middle slices of ``count`` scans, evenly spread over the used ones.

    Left of the image is left of the head, whatever the orientation of the file. Preparation and
    augmentation are those that `ADNIDataModule` has by default.

    Args:
        path: of the PNG.
        records: checked, all of one kind.
        count: number of scans, at least one.
    """
    used = [record for record in records if record.used]
    chosen = np.unique(np.linspace(0, len(used) - 1, min(count, len(used))).round())
    records = [used[int(number)] for number in chosen]
    fixed = fixed_transforms(SHAPE, SPACING_MM, choose_profile("auto", records))
    dataset = ScanDataset(records, fixed)
    varied = ScanDataset(records, fixed, random_transforms(flip=False), draws=Draws(0))
    numbers = range(len(records))
    figure = Figure(figsize=(9 * _INCHES, (len(numbers) + 0.4) * _INCHES), layout="constrained")
    axes = figure.subplots(len(numbers), 9, squeeze=False)
    for row, number in zip(axes, numbers):
        record, item = dataset.data[number], dataset[number]
        _draw(row[:3], *_as_it_lies(record.path))
        _draw(row[3:6], *_prepared(item))
        _draw(row[6:], *_prepared(varied[number]))
        row[0].set_ylabel(f"{record.image_id}\n{record.dx}", fontsize=7)
    for column, stage in ((1, "on disk"), (4, "prepared"), (7, "augmented")):
        axes[0][column].set_title(f"{stage}\n{_PLANES[1]}", fontsize=8)
        for side in (0, 2):
            axes[0][column - 1 + side].set_title(_PLANES[side], fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    write_atomically(path, file.getvalue())


def _as_it_lies(path: str) -> tuple[Array, Sequence[float]]:
    """Voxels in RAS order and their size in mm."""
    image: Any = nib.as_closest_canonical(nib.load(path))
    values = np.asarray(image.dataobj, dtype=np.float32)
    return values.reshape(values.shape[:3]), image.header.get_zooms()[:3]


def _prepared(item: Item) -> tuple[Array, Sequence[float]]:
    image: Tensor = item["image"]
    sizes = item["affine"][:3, :3].norm(dim=0).tolist()
    return image[0].numpy(), sizes


def _draw(axes: Any, values: Array, sizes: Sequence[float]) -> None:
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, (1, 99.5)) if finite.size else (0.0, 1.0)
    for across, panel in enumerate(axes):
        plane = np.take(values, values.shape[across] // 2, axis=across)
        first, second = (size for axis, size in enumerate(sizes) if axis != across)
        panel.imshow(
            plane.T, cmap="gray", origin="lower", vmin=low, vmax=high, aspect=second / first
        )
        panel.set_xticks([])
        panel.set_yticks([])
