"""Voxel grids, millimetre coordinates and smooth random fields.

Coordinates are arrays of shape (3, X, Y, Z) in RAS millimetres, float32. Everything is written as
sums of products, never as a matrix product of large arrays: the result must not depend on how many
threads a BLAS library uses, because one seed has to give one sequence of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Array = npt.NDArray[Any]

# room for a head, its pose and its scalp, around the MNI152 origin
FIELD_BOX_MM = ((-135.0, 135.0), (-170.0, 140.0), (-115.0, 150.0))


@dataclass(frozen=True)
class Grid:
    """A voxel grid: its shape and the 4 x 4 affine from voxel index to RAS millimetres."""

    shape: tuple[int, int, int]
    affine: Array

    @property
    def voxel_ml(self) -> float:
        """Volume of one voxel in millilitres."""
        return float(abs(np.linalg.det(self.affine[:3, :3]))) / 1000.0

    @property
    def spacing_mm(self) -> Array:
        """Voxel size along each array axis, shape (3,)."""
        return np.asarray(np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)))

    def coordinates(self) -> Array:
        """Return the centres of all voxels, (3, X, Y, Z) float32 in mm."""
        i, j, k = np.ogrid[tuple(slice(0, n) for n in self.shape)]
        rows = [row[0] * i + row[1] * j + row[2] * k + row[3] for row in self.affine[:3]]
        return np.stack(rows).astype(np.float32)

    def to_voxels(self, xyz: Array) -> Array:
        """Turn millimetres (3, ...) into fractional voxel indices of this grid."""
        inverse = np.linalg.inv(self.affine)
        return linear(inverse[:3, :3], inverse[:3, 3], xyz)

    def sample(self, volume: Array, xyz: Array, *, outside: str = "constant") -> Array:
        """Read ``volume``, which lies on this grid, at ``xyz`` (trilinear)."""
        return sample(volume, self.to_voxels(xyz), outside=outside)


def linear(matrix: Array, offset: Array, xyz: Array) -> Array:
    """``matrix @ xyz + offset`` along the first axis, in float32."""
    m, o = matrix.astype(np.float32), offset.astype(np.float32)
    return np.stack(
        [m[r, 0] * xyz[0] + m[r, 1] * xyz[1] + m[r, 2] * xyz[2] + o[r] for r in (0, 1, 2)]
    )


def sample(volume: Array, ijk: Array, *, outside: str = "constant") -> Array:
    """Trilinear interpolation of ``volume`` at voxel coordinates ``ijk`` (3, ...)."""
    out = np.empty(ijk.shape[1:], np.float32)
    ndimage.map_coordinates(volume, ijk, output=out, order=1, mode=outside, prefilter=False)
    return out


def centred_grid(box_mm: tuple[tuple[float, float], ...], spacing_mm: Array) -> Grid:
    """The grid of the given voxel size (3,) that lies centred in a box of RAS millimetres."""
    low = np.array([side[0] for side in box_mm])
    high = np.array([side[1] for side in box_mm])
    counts = np.floor((high - low) / spacing_mm + 1e-6).astype(int) + 1
    origin = (low + high) / 2 - (counts - 1) * spacing_mm / 2
    affine = np.diag([*spacing_mm, 1.0])
    affine[:3, 3] = origin
    return Grid((int(counts[0]), int(counts[1]), int(counts[2])), affine)


@dataclass(frozen=True)
class SmoothField:
    """Smooth random values on a coarse lattice, so that they do not depend on the image's grid."""

    lattice: Grid
    values: Array  # (channels, X, Y, Z)

    @classmethod
    def random(cls, rng: np.random.Generator, sigma_mm: float, channels: int = 1) -> SmoothField:
        """Gaussian noise smoothed with ``sigma_mm`` and scaled to unit standard deviation."""
        lattice = centred_grid(FIELD_BOX_MM, np.full(3, sigma_mm / 2.0))
        values = rng.standard_normal((channels, *lattice.shape)).astype(np.float32)
        for channel in values:
            ndimage.gaussian_filter(channel, 2.0, output=channel, mode="nearest")
            channel /= channel.std()
        return cls(lattice, values)

    def at(self, xyz: Array) -> Array:
        """Values at ``xyz`` (3, X, Y, Z) in mm: (channels, X, Y, Z)."""
        ijk = self.lattice.to_voxels(xyz)
        return np.stack([sample(channel, ijk, outside="nearest") for channel in self.values])
