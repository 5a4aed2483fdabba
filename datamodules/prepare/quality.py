"""What a person looks at before believing a prepared scan: one picture each, one page of all."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..atomic import write_atomically
from ..synth.grids import Array, Grid
from .template import template

_SHOWN_MM = 2.0  # voxel size of the pictures
_PLANES = ("sagittal", "coronal", "axial")
_CUTS_MM = ((-24.0, 0.0, 24.0), (-50.0, -18.0, 20.0), (-20.0, 10.0, 40.0))  # of the template


def draw_quality(
    path: Path, title: str, scan: Array, field: Array, affine: Array, registered: Array | None
) -> None:
    """Draw a scan as it came, its bias field, and what it became, under the template's outline.

    Args:
        path: of the PNG.
        title: of the picture.
        scan: (X, Y, Z) in RAS order.
        field: (X, Y, Z) the factor of the bias field.
        affine: (4, 4) of both.
        registered: (X, Y, Z) on the template's grid of 2 mm; None where that failed.
    """
    figure = Figure(figsize=(8.2, 9.6), facecolor="black")
    axes = figure.subplots(4, 3, gridspec_kw={"wspace": 0.02, "hspace": 0.06})
    figure.subplots_adjust(0.02, 0.01, 0.98, 0.89)
    sizes = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    top = float(np.percentile(scan, 99.5))
    for axis, panel in enumerate(axes[0]):
        plane, aspect = _plane(scan, axis, scan.shape[axis] // 2, sizes)
        panel.imshow(plane, "gray", vmax=top, origin="lower", aspect=aspect)
        plane, _ = _plane(field, axis, field.shape[axis] // 2, sizes)
        panel.contour(plane, levels=[0.7, 0.85, 1.0, 1.15, 1.3], cmap="coolwarm", linewidths=0.7)
        panel.set_title(f"as it came, {_PLANES[axis]}", color="white", fontsize=8, pad=2)
    for row in axes[1:]:
        for panel in row:
            panel.set_visible(registered is not None)
    if registered is not None:
        _draw_registered(axes[1:], registered)
    for panel in axes.flat:
        panel.set_axis_off()
    figure.text(0.03, 0.985, fill(title, 100), color="white", fontsize=10, va="top")
    figure.text(
        0.03,
        0.945,
        "Lines in the first row: the bias field, in steps of 15 %. Below: registered, with the "
        "template's brain (red)\nand its ventricles and white matter (yellow). Left is left.",
        color="#bbbbbb",
        fontsize=8,
        va="top",
    )
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80, facecolor="black")
    write_atomically(path, file.getvalue())


def _draw_registered(axes: Any, registered: Array) -> None:
    known = template(_SHOWN_MM)
    top = float(np.percentile(registered[known.brain], 99.5)) * 1.1
    for axis in range(3):
        for row, place in zip(axes, _CUTS_MM[axis]):
            at = round(float(place - known.grid.affine[axis, 3]) / _SHOWN_MM)
            panel = row[axis]
            plane, _ = _plane(registered, axis, at, np.ones(3))
            panel.imshow(plane, "gray", vmin=0, vmax=top, origin="lower")
            brain, _ = _plane(known.brain.astype(float), axis, at, np.ones(3))
            tissue, _ = _plane(known.t1, axis, at, np.ones(3))
            panel.contour(brain, levels=[0.5], colors="red", linewidths=0.8)
            panel.contour(tissue, levels=[0.35, 0.78], colors="yellow", linewidths=0.4)


def _plane(values: Array, axis: int, at: int, sizes: Array) -> tuple[Array, float]:
    """A slice with rows that go up, and the height of its voxels over their width."""
    first, second = (size for other, size in enumerate(sizes) if other != axis)
    return np.take(values, at, axis=axis).T, float(second / first)


def registered_picture(resampled: Array, grid: Grid) -> Array:
    """A registered scan on the template's grid of the pictures, the nearest voxels of it."""
    return grid.sample(resampled, template(_SHOWN_MM).grid.coordinates())


def write_page(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the page of all scans, what failed first and then what is least like the template.

    Args:
        path: of the HTML file.
        rows: of the table; ``picture`` is a path relative to the page, or empty.
    """
    shown = sorted(
        rows, key=lambda row: (row["problem"] == "", float(str(row["correlation"] or 0)))
    )
    columns = [name for name in (shown[0] if shown else {}) if name != "picture"]
    names = [name for name in columns if any(str(row[name]) for row in shown)]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = ""
    for row in shown:
        cells = "".join(f"<td>{escape(str(row[name]))}</td>" for name in names)
        body += f"<tr>{cells}</tr>\n"
        if row["picture"]:
            source = escape(str(row["picture"]))
            body += (
                f'<tr><td colspan="{len(names)}"><img loading="lazy" src="{source}"></td></tr>\n'
            )
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Prepared scans</title>'
        "<style>body{font:14px system-ui,sans-serif;margin:1rem}td,th{padding:.2rem .6rem;"
        "text-align:left}img{width:880px;max-width:100%}</style></head>\n<body>"
        f"<h1>Prepared scans: {len(rows)}</h1><p>What failed comes first, then what is least like "
        "the template. Look at each: red must follow the edge of the brain.</p>\n"
        f"<table><tr>{head}</tr>\n{body}</table></body></html>\n"
    )
    write_atomically(path, text.encode())
