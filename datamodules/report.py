"""Who is in the data: the table that papers print, and a report that may be shared.

ADNI's terms forbid to publish identifiers. The shareable report therefore has neither subject nor
image IDs, no dates and no paths: counts, and for each scan the hash of its file with its class and
part. Whoever has the same download can tell from it whether the same scans were used.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from .atomic import write_atomically
from .records import ScanRecord
from .tables import table_bytes

_SHOWN = 3  # different values of one column


@dataclass(frozen=True)
class Group:
    """One row of the table: the subjects of a class at their first scan that is used.

    Attributes:
        diagnosis: the class; ``all`` in the last row.
        subjects: number of subjects.
        scans: number of used scans, later ones too.
        males_females: number of each, as ``12/9``.
        age: years: mean and standard deviation over those for whom they are known.
        mmse: likewise of the mini-mental state.
        cdr_sb: likewise of the clinical dementia rating, sum of boxes.
        apoe4: carriers of an e4 allele, of those for whom it is known.
        field_strength: number of people by value.
        phase: likewise.
        sites: likewise.
        scanners: likewise.
        cohorts: likewise, where there are several.
        voxel_mm: side of a cube of a voxel's size: mean and standard deviation.
    """

    diagnosis: str
    subjects: int
    scans: int
    males_females: str
    age: str
    mmse: str
    cdr_sb: str
    apoe4: str
    field_strength: str
    phase: str
    sites: str
    scanners: str
    cohorts: str
    voxel_mm: str


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


def p_values(records: Sequence[ScanRecord]) -> dict[str, float]:
    """How likely the classes would differ so much by chance, by column of the table.

    One-way analysis of variance (for two classes Student's t-test) of age, MMSE, CDR and voxel
    size, a chi-squared test of everything that is counted, and of a measure that is the same for
    all of a class. Columns in which nothing differs are left out. With few people per site the
    latter is a rough one.
    """
    people = first_scans(records)
    labels = sorted({record.label for record in people if record.label is not None})
    classes = [[record for record in people if record.label == label] for label in labels]
    found: dict[str, float] = {}
    for column, measure in _MEASURES.items():
        values = [[v for r in own if (v := measure(r)) is not None] for own in classes]
        if any(len(set(own)) > 1 for own in values):
            if len(values) > 1 and min(map(len, values)) > 1:
                found[column] = float(stats.f_oneway(*values).pvalue)
        elif (p := _p_of_counts([Counter(own) for own in values])) is not None:
            found[column] = p
    for column, kind in _KINDS.items():
        p = _p_of_counts([Counter(k for r in own if (k := kind(r))) for own in classes])
        if p is not None:
            found[column] = p
    return found


def _p_of_counts(counts: Sequence[Counter[Any]]) -> float | None:
    """The p-value of a chi-squared test of counts per class; nothing where none differ."""
    kinds = sorted(set().union(*counts))
    if len(kinds) < 2 or len(counts) < 2 or not all(counts):
        return None
    return float(stats.chi2_contingency([[own[k] for k in kinds] for own in counts]).pvalue)


_MEASURES: dict[str, Callable[[ScanRecord], float | None]] = {
    "age": lambda record: record.age,
    "mmse": lambda record: record.mmse,
    "cdr_sb": lambda record: record.cdr_sb,
    "voxel_mm": lambda record: _voxel_mm(record),
}
_KINDS: dict[str, Callable[[ScanRecord], str]] = {
    "males_females": lambda record: record.sex,
    "apoe4": lambda record: "" if record.apoe4 is None else str(record.apoe4 > 0),
    "field_strength": lambda record: _tesla(record),
    "phase": lambda record: record.phase,
    "sites": lambda record: record.site,
    "scanners": lambda record: record.scanner,
    "cohorts": lambda record: record.cohort,
}


def p_text(value: float | None) -> str:
    """A p-value as papers print it; nothing when there is none."""
    return "" if value is None else "<0.001" if value < 0.001 else f"{value:.2g}"


def _voxel_mm(record: ScanRecord) -> float | None:
    sizes = [float(size) for size in record.zooms.split()]
    return round(prod(sizes) ** (1 / 3), 3) if sizes else None


def _tesla(record: ScanRecord) -> str:
    return "" if record.field_strength is None else f"{record.field_strength:g} T"


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
        _spread([record.cdr_sb for record in people]),
        _carriers([record.apoe4 for record in people]),
        _counts([_tesla(record) for record in people]),
        _counts([record.phase for record in people]),
        _counts([record.site for record in people]),
        _counts([record.scanner for record in people]),
        _counts([record.cohort for record in people]),
        _spread([_voxel_mm(record) for record in people]),
    )


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ± {stdev(known):.2f}" if len(known) > 1 else ""
    missing = f" ({len(values) - len(known)} unknown)" if len(known) < len(values) else ""
    return f"{fmean(known):.2f}{spread}{missing}"


def _carriers(alleles: Sequence[int | None]) -> str:
    known = [number for number in alleles if number is not None]
    if not known:
        return "-"
    missing = f" ({len(alleles) - len(known)} unknown)" if len(known) < len(alleles) else ""
    return f"{sum(number > 0 for number in known)}/{len(known)}{missing}"


def _counts(values: Sequence[str]) -> str:
    """``1.5 T: 5, 3 T: 7``; of many values their number and the most frequent one."""
    counts = Counter(value for value in values if value)
    if not counts:
        return "-"
    missing = values.count("")
    unknown = f" ({missing} unknown)" if missing else ""
    if len(counts) > _SHOWN:
        most, number = counts.most_common(1)[0]
        return f"{len(counts)} ({most}: {number}){unknown}"
    return ", ".join(f"{value}: {counts[value]}" for value in sorted(counts)) + unknown


def write_demographics(path: Path, records: Sequence[ScanRecord]) -> None:
    """Write the table, tab-separated."""
    p = {name: p_text(value) for name, value in p_values(records).items()}
    rows = [*map(asdict, demographics(records)), *([{"diagnosis": "p", **p}] if p else [])]
    write_atomically(path, table_bytes(rows, [field.name for field in fields(Group)]))


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
        "demographics": [_without_sites(row) for row in demographics(records)],
        "p_values": p_values(records),
        "sha256_of_all": hashlib.sha256(json.dumps(scans).encode()).hexdigest(),
        "scans": [
            {"sha256": sha256, "dx": dx, "part": part} | ({"fold": fold} if fold >= 0 else {})
            for sha256, dx, part, fold in scans
        ],
    }


def _without_sites(row: Group) -> dict[str, object]:
    """A site's number is the beginning of its subjects' IDs."""
    return {name: value for name, value in asdict(row).items() if name != "sites"}


def write_shareable(
    path: Path, records: Sequence[ScanRecord], task: str, rule: Mapping[str, float | str]
) -> None:
    """Write the shareable report as JSON."""
    text = json.dumps(shareable(records, task, rule), indent=1, ensure_ascii=False)
    write_atomically(path, (text + "\n").encode())


def number_table(parts: Mapping[str, Sequence[ScanRecord]], name: str) -> list[str]:
    """Scans, subjects and the number to be told, a line per part of a split below one of names."""
    lines = [f"{'':8}{'scans':>8}{'subjects':>10}  {name}"]
    for part, scans in parts.items():
        values = [record.target for record in scans if record.target is not None]
        shown = f"{_spread(values)}, {min(values):g} to {max(values):g}" if values else "-"
        lines.append(f"{part:8}{len(scans):>8}{len({r.subject for r in scans}):>10}  {shown}")
    return lines


def class_table(parts: Mapping[str, Sequence[ScanRecord]], names: Sequence[str]) -> list[str]:
    """Scans per class and subjects, a line per part of a split below one with the names."""
    lines = [f"{'':8}" + "".join(f"{name:>8}" for name in names) + f"{'subjects':>10}"]
    for part, scans in parts.items():
        counts = Counter(record.label for record in scans)
        numbers = "".join(f"{counts[label]:>8}" for label in range(len(names)))
        lines.append(f"{part:8}{numbers}{len({record.subject for record in scans}):>10}")
    return lines
