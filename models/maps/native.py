"""Maps in millimetres: the head, and the grid of the original scan."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.processing import resample_from_to
from scipy import ndimage

Array = npt.NDArray[Any]


def head_mask(image: Array) -> Array:
    """Where the head is in a prepared scan (D, H, W): air is exactly 0; holes are filled."""
    air, count = ndimage.label(image == 0)
    faces = [air.take(end, axis).ravel() for axis in range(air.ndim) for end in (0, -1)]
    outside = np.isin(np.arange(count + 1), np.concatenate(faces))
    outside[0] = False  # what is no air
    return np.asarray(~outside[air])


def masked(heatmap: Array, image: Array) -> Array:
    """A map (D, H, W) with nothing outside of the head, divided by its maximum again."""
    inside = np.where(head_mask(image), heatmap, 0)
    top = inside.max(initial=0)
    return inside / top if top > 0 else inside


def to_native(heatmap: Array, affine: Array, scan: Path) -> nib.Nifti1Image:
    """A map on the grid of the scan it was made from, so that both can be laid over each other.

    Args:
        heatmap: (D, H, W).
        affine: (4, 4), from its voxels to the scanner's RAS millimetres.
        scan: The original NIfTI file; only its header is read.

    Returns:
        The map with the shape and affine of the file, float32; 0 where the prepared volume ends.
    """
    original: Any = nib.load(scan)
    header, where = original.header, original.affine
    if not (int(header["sform_code"]) or int(header["qform_code"])):
        # without orientation it was taken for RAS, and nibabel takes it for LAS
        where = np.diag([-1.0, 1, 1, 1]) @ where
    grid = (original.shape[:3], where)
    there = resample_from_to(volume(heatmap, affine), grid, order=1)  # type: ignore[no-untyped-call]
    return volume(np.clip(np.asarray(there.dataobj), 0, None), original.affine)


def volume(values: Array, affine: Array) -> nib.Nifti1Image:
    """A NIfTI image of float32 in millimetres of the scanner; its header says that it is a map."""
    # nibabel has no types
    image = nib.Nifti1Image(values.astype(np.float32), affine)  # type: ignore[no-untyped-call]
    image.header.set_xyzt_units("mm")  # type: ignore[no-untyped-call]
    image.header.set_intent("estimate")  # type: ignore[no-untyped-call]
    image.set_sform(affine, 1)  # type: ignore[no-untyped-call]
    image.set_qform(affine, 1)  # type: ignore[no-untyped-call]
    return image
