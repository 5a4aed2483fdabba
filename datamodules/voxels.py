"""Are the voxels of a scan those of a head?

A file may be whole by every checksum and still hold nothing to learn from: one voxel of 1e30
flattens everything else when intensities are scaled, and a copy that was given its full length in
advance and then broke off is zero from somewhere on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .background import level
from .nifti import AGAIN, BadFile, Leniency
from .overflow import refuse_heap, refuse_wrapped

Array = npt.NDArray[Any]

_LARGEST, _SMALLEST = 1e15, 1e-15  # range of voxels: squares must fit into single precision
_OUTLIER = 20.0  # brightest voxel over the 99.9th percentile; scans have 1 to 5
_STEPS = 1e-4  # range over offset: below it single precision has less than a thousand steps
_VARIATION = 0.01  # standard deviation over mean of what is not background; brains have 0.25
_CONTRAST = 0.5  # standard deviation that clipping at three of them leaves; scans have 0.9 to 1
_SAMPLE = 1_000_000  # voxels that statistics are taken from
_TISSUE = 0.2  # of the 99th percentile: above the noise of the air, below grey matter
_SPECKS = 0.02  # of the largest area: less is no head
_BELOW_VERTEX_MM = 170.0  # scalp, skull and a large brain
_CUT_DEPTH_MM = 6.0
_ROUND_MM = 65.0  # the smallest radius of a brain
_HEAD_MM = 150.0  # from the vertex down to the base: below it a neck may be cut off
_ENDS = (("left", "right"), ("back", "front"), ("bottom", "top"))


def read_voxels(image: Any, leniency: Leniency) -> tuple[Array, dict[str, str]]:
    """The voxels (X, Y, Z) as float32, finite, the background at 0, and warnings about them.

    Raises:
        BadFile: they are not the intensities of a scan.
    """
    warnings = {}
    values = np.asarray(image.dataobj)
    while values.ndim > 3:
        values = values[..., 0]
    if values.dtype.kind == "f":
        finite = np.isfinite(values)
        if not finite.all():
            first = tuple(int(i) for i in np.argwhere(~finite)[0])
            detail = f"{int((~finite).sum())} voxels are NaN or infinite, the first at {first}"
            if leniency.nan == "error":
                action = "repair or exclude the scan, or take 0 for them: --data.nan / --nan zero"
                raise BadFile("NON_FINITE", detail, action)
            warnings["NON_FINITE"] = f"taken for 0: {detail}"
            values = np.where(finite, values, 0)
    _check_range(values)
    _refuse_wrapped(image, values)
    levelled = level(values)
    if levelled.note:
        warnings["BACKGROUND"] = levelled.note.replace(": ", ", ", 1)
    refuse_heap(levelled.values)
    _check_contrast(levelled.values)
    return levelled.values, warnings


def _refuse_wrapped(image: Any, values: Array) -> None:
    """Look at the numbers that the file has before its slope, if they are whole."""
    scaled = (image.dataobj.slope, image.dataobj.inter) != (1.0, 0.0)
    if scaled and image.get_data_dtype().kind in "iu":
        values = np.asarray(image.dataobj.get_unscaled()).reshape(values.shape)
    refuse_wrapped(values, scaled)


def _check_range(values: Array) -> None:
    """Raise unless the values are those of a picture, of which no voxel hides the rest."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        raise BadFile("CONSTANT", f"every voxel is {low:g}", AGAIN)
    if max(abs(low), abs(high)) > _LARGEST or high - low < _SMALLEST:
        detail = f"values from {low:.3g} to {high:.3g}: single precision cannot compute with them"
        raise BadFile("OUT_OF_RANGE", detail, "repair the voxels or the slope, or exclude the scan")
    if bool(((values == low) | (values == high)).all()):
        raise BadFile("BINARY_LOOKS_LIKE_MASK", f"only {low:g} and {high:g}", "exclude the mask")
    some = _sample(values).astype(np.float64)
    middle = float(np.median(some))
    usual = float(np.percentile(np.abs(some - middle), 99.9))
    if usual == 0:
        number = int((values != middle).sum())
        raise BadFile("NEARLY_CONSTANT", f"all but {number} voxels are {middle:g}", AGAIN)
    if usual < _STEPS * abs(middle):
        raise BadFile("NEARLY_CONSTANT", f"{middle:.7g} +- {usual:.2g} everywhere", AGAIN)
    furthest = low if middle - low > high - middle else high
    if abs(furthest - middle) > _OUTLIER * usual:
        place = tuple(int(i) for i in np.argwhere(values == furthest)[0])
        detail = (
            f"the voxel at {place} is {furthest:.4g}, 99.9 % are within {usual:.4g} of {middle:.4g}"
        )
        raise BadFile("OUTLIER", detail, "repair or exclude the scan: nothing else would be seen")


def _check_contrast(values: Array) -> None:
    """Raise unless scaling to mean 0 and standard deviation 1 leaves a picture.

    Args:
        values: (X, Y, Z), the background at 0.
    """
    some = _sample(values).astype(np.float64)
    inside, furthest = some[some > 0], float(values.max())
    mean, spread = float(inside.mean()), float(inside.std())
    if spread < _VARIATION * abs(mean):
        raise BadFile("NEARLY_CONSTANT", f"{mean:.5g} +- {spread:.2g} everywhere", AGAIN)
    left = float(np.clip((inside - mean) / spread, -3, 3).std())
    if left < _CONTRAST:
        share = float((np.abs(inside - mean) > 3 * spread).mean())
        detail = f"{share:.2%} of the voxels, up to {furthest:.4g}, outshine all others"
        raise BadFile("OUTLIER", detail, "repair or exclude the scan: nothing else would be seen")


def _sample(values: Array) -> Array:
    """About a million voxels, evenly spread."""
    step = max(1, values.size // _SAMPLE) | 1  # odd, or it would always meet the same columns
    return values.ravel(order="K")[::step]


def tissue(values: Array) -> npt.NDArray[np.bool_]:
    """Where there is tissue rather than air or nothing."""
    return np.asarray(values > _TISSUE * np.percentile(_sample(values), 99))


def head_box(values: Array, sizes_mm: Array) -> tuple[Array, Array]:
    """Middle (3,) in voxels and sides (3,) in mm of the box around a head, without the neck.

    The neck is what lies further below the vertex than a brain reaches.

    Args:
        values: (X, Y, Z) in RAS order.
        sizes_mm: of a voxel.
    """
    head = tissue(values)
    top = _extent(head, 2)[1]
    bottom = max(_extent(head, 2)[0], top - _BELOW_VERTEX_MM / sizes_mm[2])
    above = head[:, :, round(bottom) : round(top) + 1]
    box = np.array([_extent(above, 0), _extent(above, 1), (bottom, top)], float)
    return box.mean(axis=1), (box[:, 1] - box[:, 0] + 1) * sizes_mm


def _extent(head: npt.NDArray[np.bool_], axis: int) -> tuple[int, int]:
    """First and last plane across ``axis`` with more than specks of tissue."""
    area = head.sum(axis=tuple(other for other in range(3) if other != axis))
    planes = np.flatnonzero(area > _SPECKS * area.max())
    return int(planes[0]), int(planes[-1])


def missing_part(values: Array, sizes_mm: Array, stripped: bool) -> str:
    """Which part of the head is empty in the file; nothing when it is all there.

    Planes that hold one single value are empty. They must not lie within the head, nor follow a
    plane in which the head is still wide. Below a neck they may. A part that is missing behind the
    last plane of the file is not found, nor is an end of which less than about 2 cm are missing.

    Args:
        values: (X, Y, Z) in RAS order.
        sizes_mm: of a voxel.
        stripped: whether it is a brain without head and neck.
    """
    head = tissue(values)
    for axis, (size, ends) in enumerate(zip(sizes_mm, _ENDS)):
        rest = tuple(other for other in range(3) if other != axis)
        empty = values.min(axis=rest) == values.max(axis=rest)
        area = head.sum(axis=rest)
        wide = np.flatnonzero(area > 0.05 * area.max())
        first, last, number = int(wide[0]), int(wide[-1]), len(area)
        within = int(empty[first : last + 1].sum())
        if within:
            place = first + int(np.argmax(empty[first:]))
            return f"{within} empty planes within the head, the first is {place} from {ends[0]}"
        depth = max(2, int(_CUT_DEPTH_MM / size))  # the first one may be half empty
        most = _largest_end(depth * size)
        for end, near, beyond in (
            (ends[0], area[first : first + depth], empty[:first]),
            (ends[1], area[last + 1 - depth : last + 1], empty[last + 1 :]),
        ):
            if not beyond.any() or near.max() < most * area.max():
                continue
            if end == "bottom" and not stripped and (last - first) * size >= _HEAD_MM:
                continue
            return (
                f"the head breaks off at the {end}: {int(beyond.sum())} of {number} planes "
                f"are empty, and it is {near.max() / area.max():.0%} of its widest before them"
            )
    return ""


def _largest_end(depth_mm: float) -> float:
    """The share of its largest area that a head may have so deep below its surface, with room."""
    share = 1 - (1 - min(depth_mm / _ROUND_MM, 1)) ** 2  # of a ball
    return min(max(share + 0.2, 0.5), 0.8)
