"""The manifest: one record per scan found. The data module trains from these records only."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

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
    """With its letter, e.g. ``I9000001``."""
    path: str
    session: str = ""
    """Visit as the source writes it."""
    description: str = ""
    dx: str = ""
    """NC, MCI, AD, sMCI, pMCI or SMC."""
    dx_source: str = ""
    """Table, column and value that ``dx`` comes from."""
    dx_bl: str = ""
    """Research group in the collection table."""
    label: int | None = None
    """Index into the task's class names."""
    reason: str = ""
    age: float | None = None
    """Years at the scan."""
    sex: str = ""
    """F or M."""
    site: str = ""
    acq_date: str = ""
    """YYYY-MM-DD."""
    bytes: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    """Of the file as it lies on disk."""
    shape: str = ""
    zooms: str = ""
    axcodes: str = ""
    problem: str = ""
    split: str = ""
    """train, val or test."""

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
    neutral = [replace(record, path="", mtime_ns=0, split="") for record in records]
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
    texts = {field.name: row[field.name] for field in fields(ScanRecord) if field.type == "str"}
    return ScanRecord(
        **texts,
        label=int(row["label"]) if row["label"] else None,
        age=float(row["age"]) if row["age"] else None,
        bytes=int(row["bytes"]),
        mtime_ns=int(row["mtime_ns"]),
    )
