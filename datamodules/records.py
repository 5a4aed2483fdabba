"""The manifest: one record per scan found. The data module trains from these records only."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .atomic import write_atomically
from .errors import TableError
from .tables import table_bytes


@dataclass(frozen=True, kw_only=True)
class ScanRecord:
    """One scan. Unknown is ``""`` or None.

    It is *used* when both ``reason`` and ``problem`` are empty, *excluded* with a ``reason``
    (not wanted for this task), *bad* with a ``problem`` (wanted, but cannot be trusted).

    Attributes:
        subject: canonical PTID, e.g. ``999_S_0001``.
        image_id: with its letter, e.g. ``I9000001``; a name made of subject and session without
            one.
        path: of the file.
        layout: ida, bids, caps or csv.
        registered: ``yes`` or ``no``: whether the scan was brought to a common space; empty: not
            known.
        stripped: ``yes`` when nothing but the brain is left, ``no`` for a head; empty: neither
            clearly.
        row: table and line that describe the scan.
        session: visit, as M and the month (``M012``) where that is known, else as the source writes
            it.
        description: of the series, as the source writes it.
        dx: NC, MCI, AD, sMCI, pMCI or SMC; OD for a dementia of another cause, other for an
            impairment that is none of these.
        dx_source: table, column and value that ``dx`` comes from.
        dx_bl: research group, or the group at screening: not the diagnosis at the scan.
        label: index into the task's class names.
        reason: why it is not wanted; what follows a colon is detail.
        age: years at the scan.
        sex: F or M.
        site: number of the clinical site.
        field_strength: tesla.
        phase: ADNI1, ADNIGO, ADNI2, ADNI3 or ADNI4, as the source writes it.
        mmse: mini-mental state at the visit, 0 to 30.
        cdr_sb: clinical dementia rating at the visit, sum of boxes, 0 to 18.
        apoe4: number of APOE e4 alleles.
        acq_date: day of the scan, YYYY-MM-DD.
        exam_date: day of the visit that the diagnosis is from.
        days_apart: days between the scan and that visit.
        bytes: size of the file.
        mtime_ns: modification time of the file, in ns.
        sha256: of the file as it lies on disk.
        content: image ID of the first scan with the same picture; empty when no other has it.
        picture: hash of a coarse lattice of its voxels, the same for most ways to save it again.
        shape: voxels along each axis of the file, separated by spaces.
        zooms: size of a voxel along the same axes, in mm.
        axcodes: where the axes point to, e.g. ``RAS``.
        reach: sides in mm, right-left, back-front, down-up, of what a crop should hold: of a brain
            the box around the middle of the volume with all that is not background, of a head its
            own box.
        middle_mm: where the middle of the volume lies, in mm, ``x y z``.
        problem: code of what is wrong.
        split: train, val or test.
        fold: fold of a subject that is not held out from all folds, 0 to k - 1.
        scanner: manufacturer and model, where headers or tables say it.
        cohort: which of several studies it is from; not known where there is one.
        likeness: correlation with the mean of the other scans.
        target: number that is to be told, where the task is one; ``label`` is then 0.
    """

    subject: str
    image_id: str
    path: str
    layout: str = ""
    registered: str = ""
    stripped: str = ""
    row: str = ""
    session: str = ""
    description: str = ""
    dx: str = ""
    dx_source: str = ""
    dx_bl: str = ""
    label: int | None = None
    reason: str = ""
    age: float | None = None
    sex: str = ""
    site: str = ""
    field_strength: float | None = None
    phase: str = ""
    mmse: float | None = None
    cdr_sb: float | None = None
    apoe4: int | None = None
    acq_date: str = ""
    exam_date: str = ""
    days_apart: int | None = None
    bytes: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    content: str = ""
    picture: str = ""
    shape: str = ""
    zooms: str = ""
    axcodes: str = ""
    reach: str = ""
    middle_mm: str = ""
    problem: str = ""
    split: str = ""
    fold: int | None = None
    scanner: str = ""
    cohort: str = ""
    likeness: float | None = None
    target: float | None = None

    @property
    def order(self) -> tuple[str, list[tuple[int, str]], list[tuple[int, str]]]:
        """Sorts the scans of one subject by time."""
        return self.acq_date or self.exam_date, natural(self.session), natural(self.image_id)

    @property
    def used(self) -> bool:
        """Whether the scan takes part."""
        return not self.reason and not self.problem


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``ses-2`` before ``ses-10``."""
    return [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


# columns that are only there where something is known
_LATER = ("scanner", "cohort", "likeness", "target")


def count_line(records: Sequence[ScanRecord]) -> str:
    """``found = used + excluded + bad``, with the numbers."""
    bad = sum(1 for record in records if record.problem)
    excluded = sum(1 for record in records if record.reason and not record.problem)
    used = sum(1 for record in records if record.used)
    return f"found {len(records)} = used {used} + excluded {excluded} + bad {bad}"


def write_manifest(path: Path, records: Iterable[ScanRecord]) -> None:
    """Write the records as a tab-separated table, atomically."""
    write_atomically(path, _manifest(records))


def _manifest(records: Iterable[ScanRecord]) -> bytes:
    """The records as a tab-separated table."""
    records = list(records)
    # hashes of manifests that know neither stay as they were
    unknown = {n for n in _LATER if not any(getattr(r, n) not in ("", None) for r in records)}
    names = [name for name in _columns() if name not in unknown]
    rows = [{name: getattr(record, name) for name in names} for record in records]
    return table_bytes(rows, names)


def fingerprint(records: Iterable[ScanRecord]) -> str:
    """A hash of what decides a run: scans, contents and labels, but no path and no time."""
    nowhere = {"path": "", "row": "", "mtime_ns": 0, "split": "", "fold": None, "likeness": None}
    neutral = [replace(record, **nowhere) for record in records]  # type: ignore[arg-type]
    return hashlib.sha256(_manifest(neutral)).hexdigest()


def read_manifest(path: Path) -> list[ScanRecord]:
    """Read a manifest that ``write_manifest`` wrote.

    Raises:
        TableError: the columns are not those of this version.
    """
    with path.open(newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t")
        names = reader.fieldnames or []
        if names != [name for name in _columns() if name in names or name not in _LATER]:
            raise TableError(
                "BAD_TABLE",
                f"a manifest with the columns {reader.fieldnames}",
                str(path),
                "remove it; it is made again",
            )
        return [_parse(row) for row in reader]


def _columns() -> list[str]:
    """Names of all columns."""
    return [field.name for field in fields(ScanRecord)]


def _parse(row: dict[str, str]) -> ScanRecord:
    readers = {"str": str, "int": int, "int | None": int, "float | None": float}
    values: dict[str, Any] = {}
    for field in fields(ScanRecord):
        text = row.get(field.name, "")
        optional = str(field.type).endswith("None")
        values[field.name] = None if optional and not text else readers[str(field.type)](text)
    return ScanRecord(**values)
