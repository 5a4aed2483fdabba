"""Numbers that did not fit into their type: saturated at its end, or wrapped round to the other.

A histogram tells, and who stands beside whom. The brightest voxels of a scan are few and thin out
towards the highest value. Saturated ones are a heap on one value. Wrapped ones are dark in the
middle of the brightest: voxels just above the beginning of the type touch those just below its end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from .background import border_of, commonest
from .nifti import BadFile

Array = npt.NDArray[Any]

_TYPES = ((0, 255), (-128, 127), (0, 65535), (-32768, 32767))
_ALONE = {1: 4.0, 10: 1.5}  # voxels of one value: times the next brightest, which no picture has
_SATURATED = 0.08  # share of what is not background; clipping 1 % of a volume leaves 5 % of a brain
_EDGE = 0.02  # of a type's range, at either end
_SPIKE = 2.0  # times as many on the last value as on those before it: clipped, not wrapped
_DENSE = {True: 1e-4, False: 1e-3}  # share of the voxels in both ends; signed, unsigned
_TOUCH, _MOSTLY_TOUCH = 0.05, 0.5  # share of the brightest beside the darkest; raw heads have 0.3
_HOLES = 1e-3  # dark voxels with bright ones all around, as a share of the bright
_ACTION = "convert again into a type that holds the values (float32), or exclude the scan"


def refuse_heap(values: Array) -> None:
    """Raise where many voxels have the highest value, and it is far out or they are too many.

    Args:
        values: (X, Y, Z), the background at 0.

    Raises:
        BadFile: ``OVERFLOW``.
    """
    top = float(values.max())
    heap = values == top
    number, head = int(heap.sum()), int((values > 0).sum())
    following = float(values[~heap].max(initial=0))
    for least, times in _ALONE.items():
        if number > least and top > times * following > 0:
            detail = (
                f"{number} voxels ({number / values.size:.2%}) have one value, "
                f"{top / following:.3g} times as far from the background as any other"
            )
            raise BadFile("OVERFLOW", detail, _ACTION)
    if number > _SATURATED * head > 0:
        detail = f"{number / head:.1%} of what is not background has exactly the highest value"
        raise BadFile("OVERFLOW", f"{detail}: saturated", _ACTION)


def refuse_wrapped(stored: Array, scaled: bool = False) -> None:
    """Raise where larger values were wrapped round the end of a number type.

    Args:
        stored: (X, Y, Z), as the file has them, before a slope.
        scaled: whether the file has a slope: values that are scaled to the whole type reach both
            of its ends, with a few voxels.

    Raises:
        BadFile: ``OVERFLOW``.
    """
    if stored.dtype.kind not in "iu" and np.modf(stored.ravel()[::7])[0].any():
        return  # fractions
    stored = stored.astype(np.float32)
    low, high = float(stored.min()), float(stored.max())
    for first, last in _TYPES:
        width = _EDGE * (last - first)
        if not (first <= low < first + width and last - width < high <= last):
            continue
        found = _wrapped(stored, first, last, scaled)
        if found:
            bits = (last - first + 1).bit_length() - 1
            detail = f"larger values were wrapped round the end of {bits} bits: {found}"
            raise BadFile("OVERFLOW", detail, _ACTION)


def _wrapped(stored: Array, first: int, last: int, scaled: bool) -> str:
    """What shows that values were wrapped; nothing if nothing does."""
    most, share = commonest(border_of(stored))
    inside = stored[stored != most] if share > 0.5 else stored.ravel()
    width = _EDGE * (last - first)
    upper = int((inside > last - width).sum())
    on_last = int((inside == inside.max()).sum())
    if on_last > max(10.0, _SPIKE * (upper - on_last) / width):
        return ""
    ends = upper / inside.size, float((inside < first + width).mean())
    shown = f"{ends[0]:.2%} of the voxels lie just below {last}, {ends[1]:.2%} just above {first}"
    middle = first < 0 and most > first + 0.25 * (last - first)
    if middle and min(ends) > _DENSE[True] * scaled:
        return f"{shown}, and the background is {most:g}"
    if share > 0.5 and min(ends) > _DENSE[False] and _touching(stored, first, last, 0.1) > _TOUCH:
        return shown
    if ends[0] < _DENSE[False] / 2:
        return ""
    touching = _touching(stored, first, last, 0.2)
    if touching > _MOSTLY_TOUCH:
        return f"{touching:.0%} of the brightest voxels lie beside the darkest"
    holes = _holes(stored, first, last)
    return f"{holes:.2%} of the bright voxels are dark" if holes > _HOLES else ""


def _touching(stored: Array, first: int, last: int, part: float) -> float:
    """The share of the brightest voxels that have one of the darkest beside them.

    What has the commonest value of the border is background, and not looked at.
    """
    most, share = commonest(border_of(stored))
    bright = stored > last - part * (last - first)
    dark = stored < first + part * (last - first)
    if share > 0.5:
        dark &= stored != most
    beside = bright & ndimage.binary_dilation(dark)
    return float(beside.sum() / bright.sum()) if bright.sum() > 20 else 0.0


def _holes(stored: Array, first: int, last: int) -> float:
    """Dark voxels of which most neighbours are bright, as a share of the bright ones."""
    bright = stored > first + 0.6 * (last - first)
    dark = stored < first + 0.1 * (last - first)
    around = ndimage.uniform_filter(bright.astype(np.float32), 3)
    return float((dark & (around > 0.6)).sum() / max(bright.sum(), 1))
