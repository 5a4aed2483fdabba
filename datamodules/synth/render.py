"""From a head, a severity and a scanner to an image, and to the truth about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from .anatomy import LEFT_BOX_MM, Anatomy
from .grids import Array, Grid, SmoothField
from .levels import LEFT_EXCESS, Level
from .subject import Head, Scanner


@dataclass(frozen=True)
class Rendered:
    """An image and its truth, all on the same grid.

    Attributes:
        image: what the scanner gives, float32.
        effect: absolute difference to the same head without disease, before the scanner.
        planted: where ``effect`` exceeds 12 % of its 99th percentile; empty without disease.
        brain: brain mask.
        hippocampus_ml: volumes (left, right).
        ventricles_ml: volume of the lateral ventricles.
    """

    image: Array
    effect: Array
    planted: Array
    brain: Array
    hippocampus_ml: tuple[float, float]
    ventricles_ml: float


@dataclass(frozen=True)
class _Tissue:
    """A head without noise.

    Attributes:
        t1: (X, Y, Z) intensities.
        points: (3, X, Y, Z) where in the template each voxel was read, in mm.
        fluid_fraction: (X, Y, Z) share of each voxel that fluid has taken, 0 to 1.
    """

    t1: Array
    points: Array
    fluid_fraction: Array


def render(
    anatomy: Anatomy,
    level: Level,
    grid: Grid,
    head: Head,
    severity: float,
    scanner: Scanner,
    rng: np.random.Generator,
) -> Rendered:
    """Image one head on ``grid``; ``rng`` draws what differs from scan to scan."""
    xyz = grid.coordinates()
    points = head.to_template(xyz)
    healthy = _tissue(anatomy, points, head, 0.0)
    ill = (
        _box_drop(healthy, severity) if level.box_drop else _tissue(anatomy, points, head, severity)
    )
    effect = np.abs(ill.t1 - healthy.t1)
    brain = anatomy.grid.sample(anatomy.brain, ill.points) > 0.5
    image = _with_shell(ill.t1, xyz, grid, rng) if level.raw else ill.t1
    image = _scan(image, xyz, scanner, rng)
    if not level.raw:
        image *= brain
    kept = 1.0 - ill.fluid_fraction
    left, right = (
        float((anatomy.grid.sample(mask, ill.points) * kept).sum()) * grid.voxel_ml
        for mask in anatomy.hippocampi
    )
    ventricles = float(anatomy.grid.sample(anatomy.ventricles, ill.points).sum()) * grid.voxel_ml
    return Rendered(image, effect, _planted(effect), brain, (left, right), ventricles)


def _tissue(anatomy: Anatomy, points: Array, head: Head, severity: float) -> _Tissue:
    strength = 0.55 * severity
    excess = 0.5 * LEFT_EXCESS * severity
    field = anatomy.effect(
        head.hippocampal + strength + excess,
        head.hippocampal + strength - excess,
        head.ventricular + 0.75 * severity,
    )
    voxels = anatomy.grid.to_voxels(points)
    grid = anatomy.grid
    at_points = [
        ndimage.map_coordinates(channel, voxels, order=1, mode="nearest", prefilter=False)
        for channel in field
    ]
    moved = points + np.stack(at_points[:3])
    fluid = at_points[3]
    t1 = grid.sample(anatomy.t1, moved) * (1.0 - fluid) + anatomy.fluid * fluid
    return _Tissue(t1, moved, fluid)


def _box_drop(healthy: _Tissue, severity: float) -> _Tissue:
    inside = np.ones(healthy.t1.shape, bool)
    for coordinate, (low, high) in zip(healthy.points, LEFT_BOX_MM):
        inside &= (coordinate >= low) & (coordinate <= high)
    return _Tissue(
        np.where(inside, healthy.t1 * np.float32(1.0 - severity), healthy.t1),
        healthy.points,
        healthy.fluid_fraction,
    )


def _planted(effect: Array) -> Array:
    changed = effect[effect > 1e-4]
    if changed.size == 0:
        return np.zeros(effect.shape, bool)
    return np.asarray(effect > 0.12 * np.percentile(changed, 99))


def _with_shell(t1: Array, xyz: Array, grid: Grid, rng: np.random.Generator) -> Array:
    """Put fluid (3 mm), bone (5 mm) and scalp (6 mm) around the stripped brain."""
    texture = 1.0 + 0.1 * SmoothField.random(rng, 10.0).at(xyz)[0]
    closing = max(1, round(4.0 / float(grid.spacing_mm.mean())))
    brain = ndimage.binary_closing(t1 > 0.1, iterations=closing)
    brain = ndimage.binary_fill_holes(brain)
    distance = ndimage.distance_transform_edt(~brain, sampling=grid.spacing_mm)
    shell = np.select(
        [distance <= 0, distance <= 3, distance <= 8, distance <= 14],
        [0.0, 0.18, 0.05, 0.75 * texture],
        0.0,
    )
    return np.asarray(t1 + shell, np.float32)


def _scan(image: Array, xyz: Array, scanner: Scanner, rng: np.random.Generator) -> Array:
    """Contrast, blur, bias field, Rician noise and gain."""
    image = np.clip(image, 0.0, None) ** np.float32(scanner.gamma)
    if scanner.blur:
        image = ndimage.gaussian_filter(image, scanner.blur)
    if scanner.bias:
        field = SmoothField.random(rng, 28.0).at(xyz)[0]
        image = image * np.exp(np.clip(field, -2.5, 2.5) * np.float32(scanner.bias))
    real, imaginary = rng.standard_normal((2, *image.shape), dtype=np.float32) * scanner.noise
    noisy = np.sqrt((image + real) ** 2 + imaginary**2) * scanner.gain
    return np.asarray(noisy, np.float32)
