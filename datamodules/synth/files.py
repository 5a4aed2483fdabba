"""NIfTI files and tables, written so that a killed run leaves nothing half done."""

# mypy: allow-untyped-calls
# (most of nibabel carries no annotations)
from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

from ..atomic import write_atomically
from .anatomy import template_box_mm
from .cohort import CohortSpec
from .grids import Array, Grid, centred_grid
from .subject import rotation

_SPACINGS = ((1.0, 1.0, 1.0), (0.94, 0.94, 1.2), (1.25, 1.25, 1.2), (1.05, 1.05, 1.2))
_ORIENTATIONS = ("RAS", "LAS", "LPI", "PIR", "ASL", "LPS")
_MARGIN_MM = 18.0  # room for the head shell
# what a scanner sees of a head with face and neck, around the template's origin
_VIEW_MM = ((-100.0, 100.0), (-140.0, 116.0), (-140.0, 108.0))


@dataclass(frozen=True)
class FileForm:
    """How a scan is stored.

    Attributes:
        grid: shape and affine of the volume in RAS order; an oblique one is turned.
        orientation: axis codes of the file, which the volume is reordered to.
        storage: ``int16``, ``float32``, or ``scaled``: int16 with a slope.
        qform_only: whether the sform is left out.
        suffix: ``.nii`` or ``.nii.gz``.
    """

    grid: Grid
    orientation: str = "RAS"
    storage: str = "int16"
    qform_only: bool = False
    suffix: str = ".nii.gz"


def draw_form(rng: np.random.Generator, spec: CohortSpec, shift_mm: Array) -> FileForm:
    """Registered files all lie on one grid; raw ones vary as scanners and converters do.

    Args:
        rng: draws what varies.
        spec: of the cohort.
        shift_mm: (3,) where the head lies; the field of view of a raw cohort goes with it.
    """
    box = template_box_mm()
    if spec.difficulty != "L2" or spec.layout == "caps":
        room = _MARGIN_MM if spec.difficulty == "L2" else 0.0
        shell = tuple((low - room, high + room) for low, high in box)
        return FileForm(centred_grid(shell, np.full(3, spec.resolution_mm)))
    spacing = np.array(_SPACINGS[rng.integers(len(_SPACINGS))]) * spec.resolution_mm
    jitter = rng.normal(0, 3.0, 3)
    wide = tuple((a - _MARGIN_MM + j, b + _MARGIN_MM + j) for (a, b), j in zip(box, jitter))
    if spec.raw:
        wide = tuple((a + j, b + j) for (a, b), j in zip(_VIEW_MM, jitter + shift_mm))
    grid = centred_grid(wide, spacing)
    if spec.layout == "oasis1":  # its headers say nothing, all its images lie alike
        return FileForm(grid, orientation="ASL")
    angles = np.deg2rad(rng.uniform(-15, 15, 3)) * (rng.random() < 0.15)
    return FileForm(
        _turned(grid, rotation(angles)),
        orientation=str(rng.choice(_ORIENTATIONS)),
        storage=str(rng.choice(["int16", "float32", "scaled"], p=[0.6, 0.2, 0.2])),
        qform_only=bool(rng.random() < 0.1),
        suffix=str(rng.choice([".nii.gz", ".nii"], p=[0.8, 0.2])),
    )


def _turned(grid: Grid, turn: Array) -> Grid:
    """The grid rotated about its own centre (an oblique acquisition)."""
    affine = grid.affine.copy()
    middle = grid.affine @ np.array([*((np.array(grid.shape) - 1) / 2), 1.0])
    affine[:3, :3] = turn @ grid.affine[:3, :3]
    affine[:3, 3] = middle[:3] - affine[:3, :3] @ ((np.array(grid.shape) - 1) / 2)
    return Grid(grid.shape, affine)


def nifti_bytes(volume: Array, form: FileForm, storage: str) -> bytes:
    """An uncompressed NIfTI-1 file: RAS volume in, file in the form's orientation out."""
    if storage in ("int16", "uint8"):
        limit = np.iinfo(storage).max
        volume = np.clip(np.rint(volume), 0, limit).astype(storage)
    image = nib.Nifti1Image(volume, form.grid.affine)
    image.header.set_xyzt_units("mm")
    start = nib.io_orientation(form.grid.affine)
    target = nib.orientations.axcodes2ornt(tuple(form.orientation))
    image = image.as_reoriented(nib.orientations.ornt_transform(start, target))
    image.set_qform(image.affine, 1)
    image.set_sform(None if form.qform_only else image.affine, 0 if form.qform_only else 1)
    image.set_data_dtype(np.int16 if storage == "scaled" else volume.dtype)
    return bytes(image.to_bytes())


def write_volume(path: Path, volume: Array, form: FileForm, storage: str) -> int:
    """Write a volume atomically, gzipped when the name ends in ``.gz``; return its bytes."""
    data = nifti_bytes(volume, form, storage)
    if path.suffix == ".gz":
        buffer = io.BytesIO()
        # no name and no time in the header: the same volume is the same file
        with gzip.GzipFile("", "wb", compresslevel=5, fileobj=buffer, mtime=0) as stream:
            stream.write(data)
        data = buffer.getvalue()
    write_atomically(path, data)
    return len(data)
