"""What around a head is nothing: found from the border of the volume, and brought to 0.

Scans come in any unit: as scanners give them, scaled to -1 to 1, or with mean 0 and standard
deviation 1, of the whole volume or of the head alone, which leaves the background in the middle of
the values. What fills the border of the volume is background. When it is 0 and nothing lies below
it, everything later may say "above 0", and a change of scale or offset changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from .nifti import BadFile

Array = npt.NDArray[Any]

_FLAT = 0.5  # share of the border with one value that makes it the background's
_NEAR = 0.05  # of the range of a head: differences that are noise
_FAR = 1.0  # of the range of a head: a padding so far below belongs to no scale
_FEW = 0.001  # share of the voxels
_BRIGHT, _ODDLY_BRIGHT = 0.7, 0.3  # share of the border above Otsu's threshold; necks have 0.1
_SHIFTED = 0.02  # of the range: a background so near to 0 is not worth a word
_SAMPLE = 1_000_000
_SLOPE = "correct the slope, which turns bright into dark, or convert again from DICOM"


@dataclass(frozen=True)
class Levelled:
    """A scan with its background at 0.

    Attributes:
        values: (X, Y, Z) float32, nothing below 0.
        note: where the background was before, if that was not 0; else empty.
    """

    values: Array
    note: str = ""


def level(values: Array) -> Levelled:
    """Bring the background to 0 and everything else above it; the scale stays.

    Args:
        values: (X, Y, Z), finite.

    Raises:
        BadFile: nothing can be told to be background, or it is the brightest.
    """
    values = values.astype(np.float32)
    border = border_of(values)
    most, share = commonest(border)
    if share < _FLAT:
        return _noisy(values, border)
    rest = _sample(values[values != most])
    if not rest.size:
        return Levelled(values - most)
    low, high = (float(x) for x in np.percentile(rest, [100 * _FEW, 100 * (1 - _FEW)]))
    top = max(high - min(low, most), float(np.finfo(np.float32).tiny))
    below, above = float((rest < most).mean()), float((rest > most).mean())
    if above < _FEW or high <= most:
        raise BadFile(
            "INVERTED",
            f"the background ({most:g}) is brighter than the head ({low:.4g} to {high:.4g})",
            _SLOPE,
        )
    if below <= _FEW or most - low <= _NEAR * top:
        gap = low - most
        if gap > _FAR * (high - low) > 0:  # a padding far below all values
            note = f"the background is {most:.4g}, far below all values from {low:.4g} on"
            return Levelled(_above(values, values != most, low, high), note)
        note = f"the background is not 0: {most:.4g}" if abs(most) > _SHIFTED * top else ""
        return Levelled(np.maximum(values - most, 0), note)
    note = f"the background lies within the values: {most:.4g} of {low:.4g} to {high:.4g}"
    head = np.asarray(ndimage.binary_fill_holes(values != most))
    return Levelled(_above(values, head, low, high), note)


def _above(values: Array, head: Array, low: float, high: float) -> Array:
    """The head from just above 0 on, everything else 0."""
    least = 1e-3 * (high - low)
    return np.where(head, np.maximum(values - low, least), np.float32(0)).astype(np.float32)


def _noisy(values: Array, border: Array) -> Levelled:
    """Air with noise: its lowest values become 0."""
    low = float(np.percentile(border, 1))
    levelled = np.maximum(values - low, 0)
    threshold = otsu(levelled)
    bright = float((border - low > threshold).mean())
    inner = tuple(slice(n // 4, n - n // 4) for n in values.shape)
    if bright > 0.5 and np.median(levelled[inner]) <= threshold:
        raise BadFile(
            "INVERTED",
            f"the border (median {np.median(border):.4g}) is brighter than what it surrounds "
            f"(median {np.median(values[inner]):.4g})",
            _SLOPE,
        )
    if bright > _BRIGHT:
        raise BadFile(
            "NO_BACKGROUND",
            f"{bright:.0%} of the border of the volume is as bright as a head",
            "give the whole scan: the head must be surrounded by air, or by one value",
        )
    if bright > _ODDLY_BRIGHT:
        return Levelled(levelled, f"{bright:.0%} of the border is as bright as a head")
    offset = abs(low) > 0.1 * np.percentile(_sample(levelled), 99.9)
    note = f"the background is not 0: {np.median(border):.4g}" if offset else ""
    return Levelled(levelled, note)


def border_of(values: Array) -> Array:
    """The voxels of the six faces, as one row."""
    faces = [values[0], values[-1], values[:, 0], values[:, -1], values[:, :, 0], values[:, :, -1]]
    return np.concatenate([face.ravel() for face in faces])


def otsu(values: Array) -> float:
    """The threshold between dark and bright (Otsu 1979): the largest variance between the two.

    Args:
        values: of any shape, from 0 on.
    """
    some = _sample(values)
    top = float(np.quantile(some, 0.999))  # a few bright vessels say nothing
    if top <= 0:
        return 0.0
    counts = np.histogram(some, 256, (0.0, top))[0].astype(float)
    middles = (np.arange(256) + 0.5) * top / 256
    dark = counts.cumsum()
    bright, sums = dark[-1] - dark, (counts * middles).cumsum()
    means = sums / np.maximum(dark, 1) - (sums[-1] - sums) / np.maximum(bright, 1)
    return float(middles[int((dark * bright * means**2).argmax())])


def commonest(border: Array) -> tuple[float, float]:
    """The most frequent value and its share."""
    found, counts = np.unique(border, return_counts=True)
    most = int(counts.argmax())
    return float(found[most]), float(counts[most] / border.size)


def _sample(values: Array) -> Array:
    """About a million voxels, evenly spread."""
    step = max(1, values.size // _SAMPLE) | 1  # odd, or it would always meet the same columns
    return values.ravel(order="K")[::step]
