"""From all scans that were found to those of each part: who was left out, and why (a flow chart).

Counts only, so that it may be published.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from .atomic import write_atomically
from .records import ScanRecord


def flow(
    records: Sequence[ScanRecord],
    parts: Mapping[str, Sequence[ScanRecord]],
    class_names: Sequence[str],
) -> dict[str, object]:
    """Counts of scans and people at each step; every scan is in exactly one place.

    Args:
        records: the whole manifest, with its parts.
        parts: scans of ``train``, ``val`` and ``test`` that are used there; of people that are
            held out often the first scan alone.
        class_names: of the labels.
    """
    bad = [record for record in records if record.problem]
    excluded = [record for record in records if record.reason and not record.problem]
    used = [record for record in records if record.used]
    kept = sum(map(len, parts.values()))
    return {
        "found": _size(records),
        "excluded": _size(excluded)
        | {"why": dict(Counter(r.reason.partition(":")[0] for r in excluded).most_common())},
        "bad": _size(bad) | {"why": dict(Counter(r.problem for r in bad).most_common())},
        "used": _size(used),
        "later_scans_of_held_out_people": len([r for r in used if r.split]) - kept,
        "parts": {
            name: _size(own) | {"classes": _classes(own, class_names)}
            for name, own in parts.items()
        },
    }


def _size(records: Sequence[ScanRecord]) -> dict[str, object]:
    return {"scans": len(records), "people": len({record.subject for record in records})}


def _classes(records: Sequence[ScanRecord], names: Sequence[str]) -> dict[str, int]:
    if any(record.target is not None for record in records):
        return {}  # a number has no classes
    counts = Counter(record.label for record in records)
    return {name: counts[label] for label, name in enumerate(names)}


def write_flow(path: Path, counts: Mapping[str, object]) -> None:
    """Write the counts as JSON, atomically."""
    write_atomically(path, (json.dumps(counts, indent=1) + "\n").encode())
