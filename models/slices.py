"""Slices through a head, seven along each axis in a row, with what is laid over them.

Each row is one image of the scan and one of the map: a picture takes a tenth of a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from models.maps.native import Array

_NUMBER = 7  # slices of a row
_ROOM_MM = 4.0  # around the head
_BRIGHT, _ROOM = 99.5, 1.2  # this percentile of the slices, with room for colours, is white


def ends_mm(head: Array, affine: Array) -> Array:
    """Lowest and highest place (3, 2) in mm of a mask (D, H, W); of an empty one all of it."""
    index = [np.flatnonzero(head.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(3)]
    first = [found[0] if len(found) else 0 for found in index]
    last = [found[-1] if len(found) else n - 1 for found, n in zip(index, head.shape)]
    corners = np.array(np.meshgrid(*zip(first, last))).reshape(3, 8)
    there = affine[:3, :3] @ corners + affine[:3, 3:]
    return np.stack([there.min(axis=1), there.max(axis=1)], axis=1)


def places(ends: Array, through: float) -> list[float]:
    """Seven slices between the ends (2,) of a head in mm, one of them through a given point."""
    found = np.linspace(ends[0], ends[1], _NUMBER + 2)[1:-1]
    found[np.abs(found - through).argmin()] = through
    return sorted(found.tolist())


@dataclass(frozen=True)
class Volume:
    """Values on a grid along the axes of the scanner.

    Attributes:
        values: (X, Y, Z) in RAS order.
        voxel_mm: size of a voxel, (3,).
        origin_mm: middle of the first one, (3,).
    """

    values: Array
    voxel_mm: Array
    origin_mm: Array


@dataclass(frozen=True)
class Cut:
    """Where a head is cut: a cube around it, and places along each axis.

    Attributes:
        low_mm: corner of the cube, (3,).
        side_mm: of the cube.
        cuts_mm: slices along each axis.
    """

    low_mm: Array
    side_mm: float
    cuts_mm: tuple[Sequence[float], ...]

    def row(self, volume: Volume, axis: int, empty: float = 0.0) -> Array:
        """The slices along an axis (rows upwards, columns), one beside the other."""
        across = [other for other in range(3) if other != axis]
        index = [self._voxels(volume, other) for other in across]
        shape, tiles = volume.values.shape, []
        there = [(i >= 0) & (i < shape[k]) for i, k in zip(index, across)]
        for place in self.cuts_mm[axis]:
            at = round(float((place - volume.origin_mm[axis]) / volume.voxel_mm[axis]))
            plane = volume.values.take(min(max(at, 0), shape[axis] - 1), axis)
            tile = np.full((len(index[0]), len(index[1])), empty, dtype=plane.dtype)
            tile[np.ix_(*there)] = plane[np.ix_(*(i[ok] for i, ok in zip(index, there)))]
            tiles.append(tile.T)
        return np.concatenate(tiles, axis=1)

    def _voxels(self, volume: Volume, axis: int) -> Array:
        """Indices of the voxels within the cube; some lie outside of the volume."""
        size = volume.voxel_mm[axis]
        first = round(float((self.low_mm[axis] - volume.origin_mm[axis]) / size))
        return first + np.arange(round(self.side_mm / size))


def around(head: Array, affine: Array, through: Array) -> Cut:
    """Cut a head (D, H, W) so that one slice along each axis goes through a point in mm."""
    ends = ends_mm(head, affine)
    side = float((ends[:, 1] - ends[:, 0]).max()) + 2 * _ROOM_MM
    cuts = tuple(places(ends[axis], float(through[axis])) for axis in range(3))
    return Cut(ends.mean(axis=1) - side / 2, side, cuts)


def draw_head(figure: Figure, cut: Cut, head: Volume) -> list[Axes]:
    """Draw a scan in grey, its least value black; the axes of each row, in mm from the left."""
    found, dark = [], float(head.values.min())
    rows = [cut.row(head, axis, dark) for axis in range(3)]
    seen = np.concatenate([row[row > dark] for row in rows])
    bright = dark + _ROOM * (float(np.percentile(seen, _BRIGHT)) - dark) if seen.size else dark + 1
    for axis, row in enumerate(rows):
        axes = figure.add_axes((0, 0.55 - 0.275 * axis, 1, 0.27))
        axes.set_axis_off()
        _show(axes, cut, row, cmap="gray", vmin=dark, vmax=bright, interpolation="bilinear")
        _write_names(axes, cut, axis)
        found.append(axes)
    return found


def lay_over(rows: Sequence[Axes], cut: Cut, hot: Volume, least: float, alpha: float) -> None:
    """Draw what is hot, red to yellow from its least value to 1."""
    for axis, axes in enumerate(rows):
        row = cut.row(hot, axis)
        # a map may be nearly flat in its hottest part
        look = {"cmap": "autumn", "vmin": min(least, 0.99), "vmax": 1, "alpha": alpha}
        _show(axes, cut, np.ma.masked_less(row, least / 2), interpolation="nearest", **look)


def mark(rows: Sequence[Axes], cut: Cut, place: Array) -> None:
    """Mark a point in mm in the slices that go through it."""
    for axis, axes in enumerate(rows):
        across = [other for other in range(3) if other != axis]
        right, up = (float(place[k] - cut.low_mm[k]) for k in across)
        for number, mm in enumerate(cut.cuts_mm[axis]):
            if mm == place[axis]:
                axes.scatter([right + number * cut.side_mm], [up], s=12, c="cyan", zorder=3)


def outline(rows: Sequence[Axes], cut: Cut, mask: Volume) -> None:
    """Draw the contour of a mask."""
    for axis, axes in enumerate(rows):
        row = cut.row(mask, axis)
        if row.min() < 0.5 < row.max():
            axes.contour(
                row, [0.5], colors="lime", linewidths=0.8, extent=_extent(cut), origin="lower"
            )


def _extent(cut: Cut) -> tuple[float, float, float, float]:
    return 0, _NUMBER * cut.side_mm, 0, cut.side_mm


def _show(axes: Axes, cut: Cut, row: Any, **look: Any) -> None:
    axes.imshow(row, extent=_extent(cut), origin="lower", **look)


def _write_names(axes: Axes, cut: Cut, axis: int) -> None:
    """Places in mm, and which side is left."""
    inset = 0.1 * cut.side_mm
    for number, mm in enumerate(cut.cuts_mm[axis]):
        left, right = number * cut.side_mm, (number + 1) * cut.side_mm
        place = f"{'xyz'[axis]}={round(mm) + 0}"
        axes.text(left, 0, place, color="white", fontsize=10, va="bottom")
        if axis:
            for where, side in ((left + inset, "L"), (right - inset, "R")):
                axes.text(
                    where, cut.side_mm, side, color="white", fontsize=9, va="top", ha="center"
                )
