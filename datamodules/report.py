"""Who is in the data: the table that papers print, and a report that may be shared.

ADNI's terms forbid to publish identifiers. The shareable report therefore has neither subject nor
image IDs, no dates and no paths: counts, and for each scan the hash of its file with its class and
part. Whoever has the same download can tell from it whether the same scans were used.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean, stdev

from .atomic import write_atomically
from .records import ScanRecord


@dataclass(frozen=True)
class Group:
    """One row of the table: the subjects of a class at their first scan that is used.

    ``age`` and ``mmse`` are mean and standard deviation over those for whom they are known.
    """

    diagnosis: str
    subjects: int
    scans: int
    males_females: str
    age: str
    mmse: str


def first_scans(records: Sequence[ScanRecord]) -> list[ScanRecord]:
    """The first used scan of each subject."""
    first: dict[str, ScanRecord] = {}
    for record in sorted((r for r in records if r.used), key=lambda r: r.order):
        first.setdefault(record.subject, record)
    return list(first.values())


def demographics(records: Sequence[ScanRecord]) -> list[Group]:
    """A row for each class in the manifest, in the order of the labels, and one for all."""
    labels = sorted({r.label for r in records if r.used and r.label is not None})
    rows = []
    for label in labels:
        own = [record for record in records if record.used and record.label == label]
        names = sorted({"MCI" if _merged(own, r) else r.dx for r in own})
        rows.append(_group("/".join(names), own))
    if len(rows) > 1:
        rows.append(_group("all", [record for record in records if record.used]))
    return rows


def _merged(own: Sequence[ScanRecord], record: ScanRecord) -> bool:
    """Stable and progressive MCI under one label are MCI."""
    return record.dx in ("sMCI", "pMCI") and len({r.dx for r in own}) > 1


def _group(name: str, records: Sequence[ScanRecord]) -> Group:
    people = first_scans(records)
    sexes = Counter(record.sex for record in people)
    known = f"{sexes['M']}/{sexes['F']}"
    return Group(
        name,
        len(people),
        len(records),
        known + (f" ({sexes['']} unknown)" if sexes[""] else ""),
        _spread([record.age for record in people]),
        _spread([record.mmse for record in people]),
    )


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ± {stdev(known):.2f}" if len(known) > 1 else ""
    missing = f" ({len(values) - len(known)} unknown)" if len(known) < len(values) else ""
    return f"{fmean(known):.2f}{spread}{missing}"


def write_demographics(path: Path, records: Sequence[ScanRecord]) -> None:
    """Write the table, tab-separated."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow([field.name for field in fields(Group)])
    writer.writerows(astuple(row) for row in demographics(records))
    write_atomically(path, buffer.getvalue().encode())


def shareable(
    records: Sequence[ScanRecord], task: str, rule: Mapping[str, float | str]
) -> dict[str, object]:
    """Counts and hashes without identifiers; scans are in the order of their hashes."""
    used = [record for record in records if record.used]
    scans = sorted((r.sha256, r.dx, r.split, -1 if r.fold is None else r.fold) for r in used)
    return {
        "task": task,
        "rule": dict(rule),
        "layouts": sorted({record.layout for record in records}),
        "found": len(records),
        "used": len(used),
        "excluded": dict(
            Counter(r.reason.partition(":")[0] for r in records if r.reason and not r.problem)
        ),
        "bad": dict(Counter(record.problem for record in records if record.problem)),
        "demographics": [dict(zip(_COLUMNS, astuple(row))) for row in demographics(records)],
        "sha256_of_all": hashlib.sha256(json.dumps(scans).encode()).hexdigest(),
        "scans": [
            {"sha256": sha256, "dx": dx, "part": part} | ({"fold": fold} if fold >= 0 else {})
            for sha256, dx, part, fold in scans
        ],
    }


_COLUMNS = [field.name for field in fields(Group)]


def write_shareable(
    path: Path, records: Sequence[ScanRecord], task: str, rule: Mapping[str, float | str]
) -> None:
    """Write the shareable report as JSON."""
    text = json.dumps(shareable(records, task, rule), indent=1, ensure_ascii=False)
    write_atomically(path, (text + "\n").encode())
