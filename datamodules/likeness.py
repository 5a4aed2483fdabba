"""Is a scan a head like the others, and the same way up?

A wrong image under a right name passes every check of a single file: a head upside down, axes
exchanged, voxels in the wrong order, a phantom, another contrast. Beside the others it is seen:
each scan is brought to a coarse image of the head, of even brightness, and correlated with the mean
of all others. Where heads lie as they came they are turned and shifted onto that mean before, by so
little that what lies wrong stays wrong.

The bound is the cohort's own: heads of one cohort differ little in this number, and what is no such
head is far below them. Doubled slices and smoothing are not seen by it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage
from scipy.optimize import minimize
from scipy.spatial.transform import Rotation

from .background import otsu
from .voxels import head_box

Array = npt.NDArray[Any]

SHAPE = (24, 28, 24)
"""Voxels of a coarse image, in RAS order around the head."""
VIEW = (64, 75, 64)
"""Likewise of the planes that are kept to look at."""
_STEP_MM, _VIEW_MM = 8.0, 3.0
_EVEN_MM = 30.0  # brightness is taken from what lies within about so many mm
_LIMIT = 3.0  # standard deviations, as in the prepared scan
_ALIKE = 0.8  # a correlation from which on nothing is turned
_MOST = np.array([0.35, 0.35, 0.35, 3.0, 3.0, 3.0, 0.15])  # rad, voxels, logarithm of the scale
_EVERY = 3  # voxels are looked at while turning
_FEWEST = 8  # scans below which they say nothing of each other
_MEAN_OF = 200  # scans are enough for a mean
_SPREADS, _NEAR = 4.0, 0.2  # below the median
_LOWEST, _HIGHEST = 0.35, 0.6  # of a bound


def coarse(values: Array, sizes_mm: Array, stripped: bool) -> tuple[str, str]:
    """A coarse image of the head, of even brightness, and three planes to look at, as text.

    Args:
        values: (X, Y, Z) in RAS order, the background at 0.
        sizes_mm: of a voxel.
        stripped: whether it is a brain without a head.
    """
    blocks = np.maximum(1, (_STEP_MM / 2 / sizes_mm).astype(int))
    cut = values[tuple(slice(n // k * k) for n, k in zip(values.shape, blocks))]
    parts = [size for n, k in zip(cut.shape, blocks) for size in (n // k, k)]
    small, sizes = cut.reshape(parts).mean(axis=(1, 3, 5)), sizes_mm * blocks
    middle = _middle(small > 0) if stripped else head_box(small, sizes)[0]
    head = small > (0.0 if stripped else otsu(small))
    even = _even(small, head, sizes)
    spread = max(float(even[head].std()), 1e-6) if head.any() else 1.0
    scaled = np.where(head, (even - 1) / spread, 0).clip(-_LIMIT, _LIMIT)
    grid = _grid(SHAPE) * (_STEP_MM / sizes)[:, None] + middle[:, None]
    image = ndimage.map_coordinates(scaled, grid, order=1, mode="constant").reshape(SHAPE)
    # the middle of a block is not that of its first voxel
    planes = _planes(values, sizes_mm, middle * blocks + (blocks - 1) / 2)
    return _packed((image / _LIMIT * 127).round().astype(np.int8)), _packed(planes)


def _middle(tissue: Array) -> Array:
    found = [np.flatnonzero(tissue.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(3)]
    return np.array([(places[0] + places[-1]) / 2 for places in found])


def _even(values: Array, head: Array, sizes_mm: Array) -> Array:
    """Values over their mean in the neighbourhood, within the head: what a bias field leaves."""
    far = _EVEN_MM / sizes_mm
    total = ndimage.gaussian_filter(np.where(head, values, 0).astype(np.float32), far)
    share = ndimage.gaussian_filter(head.astype(np.float32), far)
    return np.where(head, values * share / np.maximum(total, 1e-30), 0)


def _grid(shape: tuple[int, int, int]) -> Array:
    """Places (3, n) of voxels from the middle."""
    return np.indices(shape).reshape(3, -1) - (np.array(shape)[:, None] - 1) / 2


def _planes(values: Array, sizes_mm: Array, middle: Array) -> Array:
    """Sagittal, coronal and axial plane through the middle, one after the other, 256 levels."""
    found = []
    for axis in range(3):
        shape = [1 if other == axis else n for other, n in enumerate(VIEW)]
        places = _grid((shape[0], shape[1], shape[2])) * (_VIEW_MM / sizes_mm)[:, None]
        found.append(ndimage.map_coordinates(values, places + middle[:, None], order=1))
    levels = np.concatenate(found)
    return (levels / max(float(np.percentile(levels, 99.5)), 1e-30) * 255).clip(0, 255).astype("u1")


def planes(text: str) -> list[Array]:
    """The three planes of `coarse`, rows upwards: back to front, left to right, left to right."""
    levels, found, start = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8), [], 0
    for axis in range(3):
        wide, high = (n for other, n in enumerate(VIEW) if other != axis)
        found.append(levels[start : start + wide * high].reshape(wide, high).T)
        start += wide * high
    return found


def _packed(values: Array) -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def image(text: str) -> Array:
    """The coarse image (24, 28, 24) of `coarse`, in standard deviations."""
    levels = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int8).reshape(SHAPE)
    return levels.astype(np.float32) * (_LIMIT / 127)


@dataclass(frozen=True)
class Likeness:
    """How much scans are like the mean of the others.

    Attributes:
        values: correlation of each, by its name.
        bound: below which a scan is not like them.
        mean: coarse image of those that are.
    """

    values: Mapping[str, float]
    bound: float
    mean: Array


def compare(scans: Mapping[str, str]) -> Likeness | None:
    """Compare scans with each other; None for too few.

    Args:
        scans: coarse images of `coarse`, by any unique name.
    """
    if len(scans) < _FEWEST:
        return None
    names = list(scans)
    chosen = np.unique(
        np.linspace(0, len(names) - 1, min(len(names), _MEAN_OF)).round().astype(int)
    )
    own = {names[n]: image(scans[names[n]]) for n in chosen}
    turned, bound = dict(own), _LOWEST
    kept = _most_alike(own)
    for _ in range(3):
        total = np.sum([turned[name] for name in kept], axis=0)
        found = {n: onto(own[n], total - turned[n] * (n in kept)) for n in own}
        bound = _bound([found[name][0] for name in kept])
        turned = {name: moved for name, (_, moved) in found.items()}
        kept = {name for name, (value, _) in found.items() if value >= bound}
    total = np.sum([turned[name] for name in kept], axis=0)
    values = {
        name: onto(image(text), total - turned[name] * (name in kept) if name in own else total)[0]
        for name, text in scans.items()
    }
    own_bound = _bound([value for value in values.values() if value >= bound])
    return Likeness(values, own_bound, total / max(len(kept), 1))


def _most_alike(scans: Mapping[str, Array]) -> set[str]:
    """The half that is most like the majority: wrong scans are like each other, and fewer."""
    rows = np.corrcoef([scan.ravel() for scan in scans.values()])
    usual = dict(zip(scans, np.median(rows, axis=1)))
    return set(sorted(usual, key=lambda name: -usual[name])[: (len(usual) + 1) // 2])


def _bound(values: Sequence[float]) -> float:
    """Far below the median of a cohort: four of its spreads, taken from the upper half."""
    middle = float(np.median(values))
    # wrong scans spread the lower half alone
    spread = 1.4826 * float(np.median([value - middle for value in values if value >= middle]))
    return float(np.clip(middle - max(_SPREADS * spread, _NEAR), _LOWEST, _HIGHEST))


def onto(scan: Array, mean: Array) -> tuple[float, Array]:
    """Correlation of a coarse image with a mean, and the image turned and shifted onto that."""
    target = mean.ravel() - mean.mean()
    target /= max(float(np.linalg.norm(target)), 1e-12)

    def likeness(moved: Array, wanted: Array) -> float:
        away = moved - moved.mean()
        return float(away @ wanted / max(float(np.linalg.norm(away)), 1e-12))

    as_it_is = likeness(scan.ravel(), target)
    if as_it_is >= _ALIKE:
        return as_it_is, scan
    places, middle = _grid(SHAPE), (np.array(SHAPE)[:, None] - 1) / 2

    def moved(by: Array, every: int = 1) -> Array:
        turn = Rotation.from_rotvec(by[:3]).as_matrix() * np.exp(by[6])
        there = turn @ places[:, ::every] + middle + by[3:6, None]
        return np.asarray(ndimage.map_coordinates(scan, there, order=1, mode="constant"))

    few = target[::_EVERY]
    best = minimize(
        lambda by: -likeness(moved(by * _MOST, _EVERY), few),
        np.zeros(7),
        method="Powell",
        bounds=[(-1, 1)] * 7,
        options={"maxiter": 2, "xtol": 0.05, "ftol": 1e-3},
    ).x
    found = moved(best * _MOST)
    value = likeness(found, target)
    return (value, found.reshape(SHAPE)) if value > as_it_is else (as_it_is, scan)
