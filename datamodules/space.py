"""Where registered scans lie: one grid in the millimetres of the space that they share.

Two files of one space need not begin at the same place: of CAPS some images are cropped and some
are whole. The middle of the file is then another place in each, and only millimetres are the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.stats import chi2_contingency

from .errors import Problem
from .records import ScanRecord

Millimetres = tuple[float, float, float]

MNI_MIDDLE: Millimetres = (0.0, -18.0, 18.0)
"""Middle of the box of 91 x 109 x 91 voxels of 2 mm in which MNI152 is given."""
_OFF_MM = 40.0  # between the middles of a file and of that box
_SHOWN = 3
_MANY = 5  # scans of a grid
_BY_CHANCE = 0.01


def shared_middle(records: Sequence[ScanRecord]) -> Millimetres | None:
    """The point in mm around which registered scans are cropped; None if there are none.

    It is that of MNI152, or the middle of the median file where they lie in another space.
    """
    middles = [_middle(r) for r in records if r.used and r.registered == "yes" and r.middle_mm]
    if not middles:
        return None
    if max(float(np.linalg.norm(np.subtract(m, MNI_MIDDLE))) for m in middles) <= _OFF_MM:
        return MNI_MIDDLE
    x, y, z = np.median(np.array(middles), axis=0).round().tolist()
    return x, y, z


def off_middle_mm(middle_mm: str, shared: Sequence[float]) -> float:
    """How far a file's middle is from that of a space; 0 where that may be another crop of it."""
    away = float(np.linalg.norm(np.subtract([float(x) for x in middle_mm.split()], shared)))
    return away if away > _OFF_MM else 0.0


def _middle(record: ScanRecord) -> Millimetres:
    x, y, z = (float(place) for place in record.middle_mm.split())
    return x, y, z


def name_grids(records: Sequence[ScanRecord]) -> list[Problem]:
    """A warning where scans that share a space, or may do so, lie on several grids.

    Of others the grids are as many as scanners; they are named where the classes have not the same.
    """
    used = [r for r in records if r.used and r.middle_mm]
    registered = [record for record in used if record.registered == "yes"]
    if registered:
        return _named(registered, "registered", "used: all are cropped in the space they share")
    stripped = [r for r in used if r.stripped == "yes" and r.registered != "no"]
    if not stripped:
        return _named(used, "unregistered", _OF_CLASSES) if _belong_to_classes(used) else []
    return _named(
        stripped,
        "stripped",
        "if they share a space, say so in the table (column registered: yes), or voxel 0 lies at "
        "another place in each grid: they are cropped around the middle of the file",
    )


_OF_CLASSES = "a network may learn the grid instead of the disease: give scans of all classes alike"


def _belong_to_classes(records: Sequence[ScanRecord]) -> bool:
    """Whether classes lie on other grids, which are of one voxel size and shape, than by chance."""
    labels = sorted({record.dx for record in records})
    grids: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        grids[f"{record.shape} {record.zooms}"][record.dx] += 1
    table = [[counts[label] for label in labels] for counts in grids.values()]
    # grids of few scans count together: the test is one of many
    many = [row for row in table if sum(row) >= _MANY]
    rest = np.sum([row for row in table if sum(row) < _MANY], axis=0)
    table = [*many, list(rest)] if np.sum(rest) else many
    return len(table) > 1 < len(labels) and bool(chi2_contingency(table).pvalue < _BY_CHANCE)


def _named(records: Sequence[ScanRecord], what: str, action: str) -> list[Problem]:
    grids: dict[str, list[ScanRecord]] = defaultdict(list)
    for record in records:
        place = record.zooms if what == "unregistered" else f"around ({record.middle_mm})"
        grids[f"{record.shape.replace(' ', 'x')} {place} mm"].append(record)
    if len(grids) < 2:
        return []
    largest = sorted(grids.items(), key=lambda item: -len(item[1]))
    shown = "; ".join(f"{_counted(own)} on {grid}" for grid, own in largest[:_SHOWN])
    dots = "; ..." if len(largest) > _SHOWN else ""
    first = largest[1][1][0]
    return [
        Problem(
            "GRIDS",
            f"{what} scans on {len(grids)} grids: {shown}{dots}",
            action,
            first.path,
            first.subject,
            first.image_id,
            len(records),
        )
    ]


def _counted(records: Sequence[ScanRecord]) -> str:
    classes = Counter(f"{record.dx} {record.cohort}".strip() for record in records)
    return f"{len(records)} ({', '.join(f'{n} {dx}' for dx, n in sorted(classes.items()))})"
