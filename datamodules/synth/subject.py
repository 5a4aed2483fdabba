"""One person's head and one scanner's habits, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .grids import Array, SmoothField, linear
from .levels import Level

_CENTRE_MM = np.array([0.0, -18.0, 0.0])  # heads turn around the middle of the brain


@dataclass(frozen=True)
class Head:
    """Pose and shape of one person, the same at every visit.

    Attributes:
        matrix: (3, 3) affine shape and rotation, template to head.
        shift_mm: (3,) position.
        elastic: smooth deformation in units of ``elastic_mm``, or None.
        elastic_mm: its standard deviation.
        ventricular: healthy ventricle size, as growth strength.
        hippocampal: healthy hippocampus size, as shrink strength.
    """

    matrix: Array
    shift_mm: Array
    elastic: SmoothField | None
    elastic_mm: float
    ventricular: float
    hippocampal: float

    def to_template(self, xyz: Array) -> Array:
        """Where in the template the points ``xyz`` (3, X, Y, Z) of this head are found, in mm."""
        inverse = np.linalg.inv(self.matrix)
        offset = _CENTRE_MM - inverse @ (_CENTRE_MM + self.shift_mm)
        points = linear(inverse, offset, xyz)
        if self.elastic is not None:
            points += np.float32(self.elastic_mm) * self.elastic.at(points)
        return points


@dataclass(frozen=True)
class Scanner:
    """What a scanner does to an image.

    Attributes:
        gamma: exponent of the contrast.
        blur: standard deviation of the blur, in voxels.
        bias: amplitude of the logarithm of the bias field.
        noise: standard deviation of the noise, before the gain.
        gain: what the image is multiplied with at the end.
    """

    gamma: float = 1.0
    blur: float = 0.0
    bias: float = 0.0
    noise: float = 0.015
    gain: float = 1000.0


def draw_head(rng: np.random.Generator, level: Level) -> Head:
    """Draw one person; the same draws are made at every level, only scaled."""
    angles = rng.normal(0, np.deg2rad(3), 3) * level.pose
    scales = 1 + rng.normal(0, 0.04, 3) * level.pose
    shears = rng.normal(0, 0.01, 3) * level.pose
    shift = rng.normal(0, [2.0, 4.0, 4.0]) * level.pose
    ventricular = 0.15 + level.base_size * (rng.normal(0.15, 0.15) - 0.15)
    hippocampal = level.base_size * rng.normal(0, 0.05)
    shear = np.eye(3)
    shear[0, 1], shear[0, 2], shear[1, 2] = shears
    return Head(
        matrix=rotation(angles) @ np.diag(scales) @ shear,
        shift_mm=shift,
        elastic=SmoothField.random(rng, 12.0, 3) if level.elastic else None,
        elastic_mm=2.0 * level.elastic,
        ventricular=float(np.clip(ventricular, 0, 0.6)),
        hippocampal=float(np.clip(hippocampal, -0.08, 0.15)),
    )


def tilted(head: Head, rng: np.random.Generator) -> Head:
    """The same head as it lies in one scan: turned by about 8 degrees and moved by 2 cm."""
    turn = rotation(np.deg2rad(np.clip(rng.normal(0, [8.0, 5.0, 5.0]), -20, 20)))
    shift = np.clip(rng.normal(0, [8.0, 15.0, 20.0]), -40, 40)
    return replace(head, matrix=turn @ head.matrix, shift_mm=head.shift_mm + shift)


def draw_scanner(number: int, level: Level) -> Scanner:
    """The scanner with this number: the same one in every cohort."""
    if not level.scanners:
        return Scanner()
    rng = np.random.default_rng([7000, number])
    return Scanner(
        gamma=rng.uniform(0.85, 1.2),
        blur=rng.uniform(0, 0.5),
        bias=rng.uniform(0.03, 0.12),
        noise=rng.uniform(0.012, 0.03),
        gain=rng.uniform(300, 2000),
    )


def rotation(angles: Array) -> Array:
    """Rotation by ``angles`` (3,) in rad: about x, then y, then z, read from left to right."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(angles), np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    return np.asarray(about_x @ about_y @ about_z)
