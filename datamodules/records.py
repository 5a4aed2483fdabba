"""The manifest: one record per scan found. The data module trains from these records only."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .atomic import write_atomically
from .errors import TableError


@dataclass(frozen=True, kw_only=True)
class ScanRecord:
    """One scan. Unknown is ``""`` or None.

    It is *used* when both ``reason`` and ``problem`` are empty, *excluded* with a ``reason``
    (not wanted for this task), *bad* with a ``problem`` (wanted, but cannot be trusted).
    """

    subject: str
    """Canonical PTID, e.g. ``999_S_0001``."""
    image_id: str
    """With its letter, e.g. ``I9000001``; a name made of subject and session without one."""
    path: str
    layout: str = ""
    """ida, bids, caps or csv."""
    registered: str = ""
    """``yes`` or ``no``: whether the scan was brought to a common space; empty: not known."""
    stripped: str = ""
    """``yes`` when nothing but the brain is left, ``no`` for a head; empty: neither clearly."""
    row: str = ""
    """Table and line that describe the scan."""
    session: str = ""
    """Visit: M and the month (``M012``) where that is known, else as the source writes it."""
    description: str = ""
    dx: str = ""
    """NC, MCI, AD, sMCI, pMCI or SMC."""
    dx_source: str = ""
    """Table, column and value that ``dx`` comes from."""
    dx_bl: str = ""
    """Research group, or the group at screening: not the diagnosis at the scan."""
    label: int | None = None
    """Index into the task's class names."""
    reason: str = ""
    age: float | None = None
    """Years at the scan."""
    sex: str = ""
    """F or M."""
    site: str = ""
    field_strength: float | None = None
    """Tesla."""
    phase: str = ""
    """ADNI1, ADNIGO, ADNI2, ADNI3 or ADNI4, as the source writes it."""
    mmse: float | None = None
    """Mini-mental state at the visit."""
    cdr_sb: float | None = None
    """Clinical dementia rating at the visit, sum of boxes, 0 to 18."""
    apoe4: int | None = None
    """Number of APOE e4 alleles."""
    acq_date: str = ""
    """Day of the scan, YYYY-MM-DD."""
    exam_date: str = ""
    """Day of the visit that the diagnosis is from."""
    days_apart: int | None = None
    """Between the two."""
    bytes: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    """Of the file as it lies on disk."""
    content: str = ""
    """Image ID of the first scan with the same picture; empty when no other has it."""
    shape: str = ""
    zooms: str = ""
    axcodes: str = ""
    reach: str = ""
    """Sides in mm, right-left, back-front, down-up, of what a crop should hold: of a brain the box
    around the middle of the volume with all that is not background, of a head its own box."""
    problem: str = ""
    split: str = ""
    """train, val or test."""
    fold: int | None = None
    """Fold of a subject that is not in the test set, 0 to k - 1."""

    @property
    def order(self) -> tuple[str, str, str]:
        """Sorts the scans of one subject by time."""
        return self.acq_date or self.exam_date, self.session, self.image_id

    @property
    def used(self) -> bool:
        """Whether the scan takes part."""
        return not self.reason and not self.problem


def count_line(records: Sequence[ScanRecord]) -> str:
    """``found = used + excluded + bad``, with the numbers."""
    bad = sum(1 for record in records if record.problem)
    excluded = sum(1 for record in records if record.reason and not record.problem)
    used = sum(1 for record in records if record.used)
    return f"found {len(records)} = used {used} + excluded {excluded} + bad {bad}"


def write_manifest(path: Path, records: Iterable[ScanRecord]) -> None:
    """Write the records as a tab-separated table, atomically."""
    write_atomically(path, manifest_text(records).encode())


def manifest_text(records: Iterable[ScanRecord]) -> str:
    """The records as a tab-separated table."""
    names = [field.name for field in fields(ScanRecord)]
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(names)
    for record in records:
        values = [getattr(record, name) for name in names]
        writer.writerow(["" if value is None else value for value in values])
    return buffer.getvalue()


def fingerprint(records: Iterable[ScanRecord]) -> str:
    """A hash of what decides a run: scans, contents and labels, but no path and no time."""
    nowhere = {"path": "", "row": "", "mtime_ns": 0, "split": "", "fold": None}
    neutral = [replace(record, **nowhere) for record in records]  # type: ignore[arg-type]
    return hashlib.sha256(manifest_text(neutral).encode()).hexdigest()


def read_manifest(path: Path) -> list[ScanRecord]:
    """Read a manifest that ``write_manifest`` wrote.

    Raises:
        TableError: the columns are not those of this version.
    """
    with path.open(newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t")
        wanted = [field.name for field in fields(ScanRecord)]
        if reader.fieldnames != wanted:
            raise TableError(
                "BAD_TABLE",
                f"a manifest with the columns {reader.fieldnames}",
                str(path),
                "remove it; it is made again",
            )
        return [_parse(row) for row in reader]


def _parse(row: dict[str, str]) -> ScanRecord:
    readers = {"str": str, "int": int, "int | None": int, "float | None": float}
    values: dict[str, Any] = {}
    for field in fields(ScanRecord):
        text = row[field.name]
        optional = str(field.type).endswith("None")
        values[field.name] = None if optional and not text else readers[str(field.type)](text)
    return ScanRecord(**values)
