"""The healthy head, and what atrophy does to it.

Anatomy comes from the MNI152 template (ICBM 2009a, symmetric, skull-stripped) that the installed
nilearn wheel carries. It is read at run time and never copied into this project. The structures are
found in it: the hippocampi as a tube of grey matter around a hand-set polyline, the lateral
ventricles as the largest fluid component in a central box.

Atrophy is a backward displacement (where to read the template for a given point), linear in its
strength, with compact support: an exponential tail would spread half of the change over the brain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import nibabel as nib
import nilearn
import numpy as np
from scipy import ndimage

from .grids import Array, Grid, centred_grid, sample

# right hippocampus, MNI152 RAS mm, from head to tail; the left one is its mirror image
_AXIS_MM = np.array(
    [(22, -8, -22), (26, -15, -19), (28, -22, -15), (29, -30, -10), (26, -36, -4), (20, -39, 1)],
    dtype=np.float32,
)
_TUBE_MM = 6.0  # radius of a hippocampus around its axis
_SHRINK_REACH_MM = 16.0  # no displacement further from the axis than this
_GROWTH_MM = 6.0  # displacement of the ventricle's wall at strength 1
_GROWTH_REACH_MM = 18.0
_COARSEST_MM = 3.0  # a hippocampus needs at least four voxels across to be found

# the box of the "intensity drop" cohort, around the left hippocampus: RAS mm
LEFT_BOX_MM = ((-38.0, -12.0), (-46.0, 0.0), (-30.0, 8.0))


@dataclass(frozen=True)
class Anatomy:
    """Template and unit effects, all on one grid.

    Attributes:
        grid: where everything below lives.
        t1: T1 intensity, 0 to 1.
        brain: 1 inside the brain.
        hippocampi: 1 inside the (left, right) hippocampus.
        ventricles: 1 inside the lateral ventricles.
        shrink: backward displacement in mm at hippocampal strength 1, (3, X, Y, Z).
        rim: fraction of fluid in the freed rim at strength 1.
        growth: backward displacement in mm at ventricular strength 1, (3, X, Y, Z).
        fluid: T1 intensity of cerebrospinal fluid.
    """

    grid: Grid
    t1: Array
    brain: Array
    hippocampi: tuple[Array, Array]
    ventricles: Array
    shrink: Array
    rim: Array
    growth: Array
    fluid: float

    def effect(self, left: float, right: float, ventricular: float) -> Array:
        """Displacement in mm (3 channels) and fluid fraction (1 channel) for given strengths."""
        # the two sides' supports do not meet, so one field serves both
        x = self.grid.affine[0, 3] + self.grid.affine[0, 0] * np.arange(self.grid.shape[0])
        side = np.where(x < 0, left, right).astype(np.float32)[:, None, None]
        field = np.empty((4, *self.grid.shape), np.float32)
        field[:3] = self.shrink * side + self.growth * np.float32(ventricular)
        field[3] = np.clip(self.rim * side, 0.0, 0.95)
        return field


def template_box_mm() -> tuple[tuple[float, float], ...]:
    """The RAS box of the template's voxel centres, in mm."""
    image = nib.Nifti1Image.from_filename(_template_path("t1"))
    low = image.affine[:3, 3]
    high = low + np.diag(image.affine)[:3] * (np.array(image.shape) - 1)
    return tuple((float(a), float(b)) for a, b in zip(low, high))


def build_anatomy(resolution_mm: float) -> Anatomy:
    """Read the template and prepare every field for images of the given voxel size."""
    healthy = _structures(min(resolution_mm, _COARSEST_MM))
    return replace(healthy, t1=template_volume("t1", healthy.grid, resolution_mm))


@cache
def _structures(grid_mm: float) -> Anatomy:
    """All that is found in the template on a grid, which images of many voxel sizes share."""
    grid = centred_grid(template_box_mm(), np.full(3, grid_mm))
    t1, grey, white = (template_volume(kind, grid, grid_mm) for kind in ("t1", "gm", "wm"))
    brain = t1 > 0.12
    xyz = grid.coordinates()
    shrink, rim, hippocampi = _hippocampal_effect(grid, xyz, grey)
    ventricles = _find_ventricles(xyz, brain & (grey + white < 0.35))
    growth = _ventricular_growth(ventricles, grid_mm)
    for field in (*shrink, *growth):
        ndimage.gaussian_filter(field, 2.0 / grid_mm, output=field)
    return Anatomy(
        grid=grid,
        t1=t1,
        brain=brain.astype(np.float32),
        hippocampi=hippocampi,
        ventricles=ventricles.astype(np.float32),
        shrink=shrink,
        rim=rim,
        growth=growth,
        fluid=float(np.median(t1[ventricles])),
    )


def _template_path(kind: str) -> Path:
    data = Path(nilearn.__file__).parent / "datasets" / "data"
    return data / f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz"


def template_volume(kind: str, grid: Grid, resolution_mm: float) -> Array:
    image = nib.Nifti1Image.from_filename(_template_path(kind))
    volume = np.asarray(image.dataobj).astype(np.float32) / 255.0
    if resolution_mm > 1.0:  # or thin structures would alias
        volume = ndimage.gaussian_filter(volume, 0.35 * resolution_mm)
    source = Grid(volume.shape, image.affine)
    return sample(volume, source.to_voxels(grid.coordinates()), outside="nearest")


def _hippocampal_effect(
    grid: Grid, xyz: Array, grey: Array
) -> tuple[Array, Array, tuple[Array, Array]]:
    shrink = np.zeros_like(xyz)
    rim = np.zeros(grid.shape, np.float32)
    masks = []
    for mirror in (-1.0, 1.0):  # left, right
        distance, nearest = _to_polyline(xyz, _AXIS_MM * np.array([mirror, 1, 1], np.float32))
        weight = np.exp(-((distance / 7.0) ** 2)) * (distance < _SHRINK_REACH_MM)
        shrink += (xyz - nearest) * (1.1 * weight)
        mask = ((distance < _TUBE_MM) & (grey > 0.45)).astype(np.float32)
        ring = np.exp(-(((distance - 5.0) / 1.8) ** 2))
        rim += 2.2 * ring * ndimage.gaussian_filter(mask, 2.0 / float(grid.affine[0, 0]))
        masks.append(mask)
    return shrink, rim, (masks[0], masks[1])


def _to_polyline(xyz: Array, line: Array) -> tuple[Array, Array]:
    """Distance to a polyline in mm, and the nearest point on it (3, X, Y, Z)."""
    best = np.full(xyz.shape[1:], np.inf, np.float32)
    nearest = np.zeros_like(xyz)
    for start, end in pairwise(line):
        step = end - start
        along = sum((xyz[c] - start[c]) * step[c] for c in range(3)) / float((step**2).sum())
        along = np.clip(along, 0.0, 1.0)
        point = np.stack([start[c] + along * step[c] for c in range(3)])
        distance = np.sqrt(((xyz - point) ** 2).sum(axis=0))
        closer = distance < best
        best[closer] = distance[closer]
        nearest[:, closer] = point[:, closer]
    return best, nearest


def _find_ventricles(xyz: Array, fluid: Array) -> Array:
    x, y, z = xyz
    central = fluid & (np.abs(x) < 36) & (y > -52) & (y < 42) & (z > -2) & (z < 32)
    labels, count = ndimage.label(central)
    sizes = ndimage.sum_labels(central, labels, range(1, count + 1))
    return np.asarray(labels == 1 + int(np.argmax(sizes)))


def _ventricular_growth(ventricles: Array, grid_mm: float) -> Array:
    outside = ndimage.distance_transform_edt(~ventricles)
    signed_mm = ((outside - ndimage.distance_transform_edt(ventricles)) * grid_mm).astype(
        np.float32
    )
    gradient = np.stack(np.gradient(ndimage.gaussian_filter(signed_mm, 3.0 / grid_mm)))
    norm = np.sqrt((gradient**2).sum(axis=0))
    # a smooth step down to zero outside, a soft start inside
    fade = np.clip(1.0 - np.clip(signed_mm, 0.0, None) / _GROWTH_REACH_MM, 0.0, 1.0)
    reach = fade * fade * (3.0 - 2.0 * fade) / (1.0 + np.exp(-(signed_mm + 6.0) / 2.0))
    return np.asarray(-_GROWTH_MM * reach * gradient / np.maximum(norm, 1e-3), np.float32)
