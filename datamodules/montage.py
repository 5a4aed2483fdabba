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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from .atomic import write_atomically
from .cache import Item, ScanDataset
from .profiles import choose_profile
from .records import ScanRecord
from .seeding import Draws
from .space import shared_middle
from .transforms import SHAPE, SPACING_MM, fixed_transforms, random_transforms

Array = np.ndarray[Any, Any]
_PLANES = ("sagittal", "coronal", "axial")
_INCHES = 1.5  # of a panel
_MARGIN = 0.4  # for texts, in panels


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
    profile, middle = choose_profile("auto", records), shared_middle(records)
    fixed = fixed_transforms(SHAPE, SPACING_MM, profile, middle)
    dataset = ScanDataset(records, fixed)
    varied = ScanDataset(records, fixed, random_transforms(flip=False), draws=Draws(0))
    # one Axes for all panels: 54 of them take five times as long to lay out and to draw
    width, height = 9 + _MARGIN, len(records) + _MARGIN
    figure = Figure(figsize=(width * _INCHES, height * _INCHES))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    for row, record in enumerate(records):
        item = dataset[row]
        _draw(axes, row, 0, *_as_it_lies(record.path))
        _draw(axes, row, 3, *_prepared(item))
        _draw(axes, row, 6, *_prepared(varied[row]))
        label = f"{record.image_id}\n{record.dx}"
        axes.text(-_MARGIN / 2, row + 0.5, label, ha="center", va="center", size=7, rotation=90)
    for column in range(9):
        stage = {1: "on disk\n", 4: "prepared\n", 7: "augmented\n"}.get(column, "")
        text = stage + _PLANES[column % 3]
        axes.text(column + 0.5, -0.06, text, ha="center", va="bottom", size=8)
    axes.set(xlim=(-_MARGIN, 9), ylim=(len(records), -_MARGIN))
    axes.set_axis_off()
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


def _draw(axes: Axes, row: int, column: int, values: Array, sizes: Sequence[float]) -> None:
    """The three middle planes of a scan, in cells of size 1 from ``row`` and ``column`` on."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, (1, 99.5)) if finite.size else (0.0, 1.0)
    for across in range(3):
        plane = np.take(values, values.shape[across] // 2, axis=across).T
        first, second = (size for axis, size in enumerate(sizes) if axis != across)
        wide, high_mm = plane.shape[1] * first, plane.shape[0] * second
        scale = 0.48 / max(wide, high_mm)
        x, y, dx, dy = column + across + 0.5, row + 0.5, wide * scale, high_mm * scale
        extent = (x - dx, x + dx, y + dy, y - dy)  # rows of panels go down
        axes.imshow(
            plane, "gray", aspect="auto", origin="lower", vmin=low, vmax=high, extent=extent
        )
