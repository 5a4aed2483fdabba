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
        to_template: (3, 4) the affine from millimetres of the scan to those of the template that
            comes nearest to where each voxel of the brain was read.
    """

    image: Array
    effect: Array
    planted: Array
    brain: Array
    hippocampus_ml: tuple[float, float]
    ventricles_ml: float
    to_template: Array


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
    *,
    face: bool = False,
) -> Rendered:
    """Image one head on ``grid``; ``rng`` draws what differs from scan to scan.

    A raw head has a ``face`` and a neck if they are asked for.
    """
    xyz = grid.coordinates()
    points = head.to_template(xyz)
    healthy = _tissue(anatomy, points, head, 0.0)
    ill = (
        _box_drop(healthy, severity) if level.box_drop else _tissue(anatomy, points, head, severity)
    )
    effect = np.abs(ill.t1 - healthy.t1)
    brain = anatomy.grid.sample(anatomy.brain, ill.points) > 0.5
    image = _with_shell(ill.t1, xyz, grid, rng, points if face else None) if level.raw else ill.t1
    image = _scan(image, xyz, scanner, rng)
    if not level.raw:
        image *= brain
    kept = 1.0 - ill.fluid_fraction
    left, right = (
        float((anatomy.grid.sample(mask, ill.points) * kept).sum()) * grid.voxel_ml
        for mask in anatomy.hippocampi
    )
    ventricles = float(anatomy.grid.sample(anatomy.ventricles, ill.points).sum()) * grid.voxel_ml
    placed = _affine(xyz[:, brain], points[:, brain])
    return Rendered(image, effect, _planted(effect), brain, (left, right), ventricles, placed)


def _affine(xyz: Array, points: Array) -> Array:
    """The affine (3, 4) that brings ``xyz`` nearest to ``points``, (3, N) both."""
    every = max(1, xyz.shape[1] // 10_000)
    given = np.vstack([xyz[:, ::every], np.ones_like(xyz[:1, ::every])]).astype(float)
    return np.asarray(np.linalg.lstsq(given.T, points[:, ::every].T.astype(float))[0].T)


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


def _with_shell(
    t1: Array, xyz: Array, grid: Grid, rng: np.random.Generator, points: Array | None
) -> Array:
    """Put fluid (3 mm), bone (5 mm) and scalp (6 mm) around the stripped brain.

    With ``points`` (3, X, Y, Z), the places of the voxels in the template, face and neck as well.
    """
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
    if points is not None:
        shell = np.where(distance > 8, np.maximum(shell, _face(points) * texture), shell)
    return np.asarray(t1 + shell, np.float32)


def _face(points: Array) -> Array:
    """Intensity of face and neck, of the crudest form: muscle with eyes, air and a spine."""

    def inside(middle: tuple[float, ...], radii: tuple[float, ...]) -> Array:
        far = sum(((p - m) / r) ** 2 for p, m, r in zip(points, middle, radii))
        return np.asarray(far < 1)

    values = np.zeros(points.shape[1:], np.float32)
    values[inside((0, -30, -130), (58, 62, 95))] = 0.5  # neck and base of the skull
    values[inside((0, -48, -130), (22, 22, 90))] = 0.2  # spine
    values[inside((0, 52, -62), (60, 56, 60))] = 0.6
    for side in (-32, 32):
        values[inside((side, 66, -36), (18, 20, 18))] = 0.95  # fat of the orbit
        values[inside((side, 68, -36), (12, 12, 12))] = 0.15
    values[inside((0, 62, -70), (20, 34, 32))] = 0.03  # sinuses, nose and throat
    return values


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
