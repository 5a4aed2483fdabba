"""Finding one picture in two files: other name, other data type, other compression, other axes.

A file's hash changes when it is saved again. So a few voxels of each scan are kept, picked in RAS
order on a lattice around the middle, and compared by correlation. Copies correlate to 1 - 1e-5
(what storing 256 levels costs); two scans of one person on one day differ by their noise, in real
data and in the synthetic cohort by far more than 1e-3.

So it finds copies, not likenesses: a scan that was cropped, resampled, mirrored, smoothed, or saved
with new noise is another picture here. Splits by subject are what keeps those apart.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_SIDE = 12  # voxels of the lattice along each axis
_SAME = 0.9997  # correlation of one picture with itself
_BLOCK = 2048  # scans that are compared at once


def sample_voxels(values: npt.NDArray[Any]) -> str:
    """Return the voxels of a lattice, 256 levels each, as text; copies of a volume give the same.

    Args:
        values: (X, Y, Z), finite, in RAS order.
    """
    picks = [
        np.linspace(0.2 * (n - 1), 0.8 * (n - 1), _SIDE).round().astype(int) for n in values.shape
    ]
    voxels = values[np.ix_(*picks)].astype(np.float64)
    low, high = voxels.min(), voxels.max()
    levels = np.rint((voxels - low) / max(high - low, 1e-30) * 255).astype(np.uint8)
    return base64.b64encode(levels.tobytes()).decode()


def picture_hash(sample: str) -> str:
    """A hash of what ``sample_voxels`` gave, which tells nothing of the picture; empty for none."""
    return hashlib.sha256(sample.encode()).hexdigest()[:16] if sample else ""


def same_pictures(samples: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of scans to the names of all others with the same picture, for those that have any.

    Args:
        samples: what ``sample_voxels`` gave, by any unique name.
    """
    names = [name for name, sample in samples.items() if sample]
    if not names:
        return {}
    levels = np.stack([np.frombuffer(base64.b64decode(samples[n]), np.uint8) for n in names])
    rows = levels - levels.mean(axis=1, keepdims=True, dtype=np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    twins: dict[str, list[str]] = {}
    for start in range(0, len(names), _BLOCK):
        alike = rows[start : start + _BLOCK] @ rows.T > _SAME
        for i, j in np.argwhere(alike):
            if start + i != j:
                twins.setdefault(names[start + i], []).append(names[j])
    return twins
