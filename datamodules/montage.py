"""One picture of all scans, what is least like the others first."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from .atomic import write_atomically
from .checks import kept_reports
from .likeness import VIEW, planes
from .nifti import Leniency
from .records import ScanRecord

_ACROSS = 5  # scans in a row
_TEXT, _GAP = 24, 6  # pixels
_MOST = 2000  # scans: pictures of more are too large to be opened


def write_montage(
    path: Path, records: Sequence[ScanRecord], store: Path, leniency: Leniency
) -> None:
    """Draw a sagittal, a coronal and an axial plane of every scan whose file could be read.

    Below each stand its name, its class and its likeness; those that were refused are framed.

    Args:
        path: of the PNG.
        records: as the survey gives them.
        store: of the check, which keeps the planes.
        leniency: with which they were checked.
    """
    seen = kept_reports(store, leniency, [record.path for record in records])
    shown = [r for r in records if r.path in seen and seen[r.path].planes]
    shown.sort(key=lambda r: (not r.problem, 1.0 if r.likeness is None else r.likeness))
    shown = shown[:_MOST]
    wide, high = VIEW[1] + 2 * VIEW[0] + _GAP, max(VIEW[1:]) + _TEXT + _GAP
    rows = -(-len(shown) // _ACROSS)
    picture = Image.new("RGB", (wide * _ACROSS + _GAP, max(rows, 1) * high + _GAP))
    draw = ImageDraw.Draw(picture)
    for number, record in enumerate(shown):
        x, y = _GAP + wide * (number % _ACROSS), _GAP + high * (number // _ACROSS)
        place = x
        for plane in planes(seen[record.path].planes):
            below = y + max(VIEW[1:]) - len(plane)
            picture.paste(Image.fromarray(np.ascontiguousarray(plane[::-1])), (place, below))
            place += plane.shape[1]
        about = "" if record.likeness is None else f"  {record.likeness:.2f}"
        colour = "red" if record.problem else "white"
        draw.text((x, y + high - _TEXT - _GAP), record.image_id[-32:], colour)
        draw.text((x, y + high - _TEXT + 5), f"{record.dx} {record.problem}{about}", colour)
        if record.problem:
            draw.rectangle((x - 2, y - 2, x + wide - _GAP + 1, y + high - _GAP + 1), outline="red")
    file = io.BytesIO()
    picture.save(file, "PNG")
    write_atomically(path, file.getvalue())
