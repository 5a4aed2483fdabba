"""Scans as the LONI portal (IDA) delivers them.

The levels below a subject's folder have changed over the years, so they are not relied on: a scan
is a NIfTI file anywhere below a folder named after a subject, and its image ID stands at the end
of its name (or names the folder it lies in). Everything else is asked of the collection table.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .collection import PTID, Collection, CollectionRow
from .errors import NO_SCAN, FolderError, Problem
from .labels import Task, diagnosis, known_words
from .progression import Visit, label_scan
from .records import ScanRecord

_SUFFIX = re.compile(r"\.nii(\.gz)?$", re.IGNORECASE)
_ID_IN_NAME = re.compile(r"_I(\d+)$")
_ID_FOLDER = re.compile(r"I(\d+)")
TRUTH_MARKER = "synthetic_truth.json"  # names a folder with a synthetic cohort's truth: not data

# descriptions with every special character turned into an underscore, as in folder names
_T1 = re.compile(r"MP_?RAGE|^MPR(_|$)|^MT1(_|$)|SPGR", re.IGNORECASE)
_NOT_T1 = re.compile(
    r"MASK|SPATIALLY_NORMALIZED|HHP_6_DOF|HARP|SCOUT|LOCALI[SZ]ER|CALIBRATION|_ND$", re.IGNORECASE
)


Histories = Mapping[str, Sequence[Visit]]  # diagnoses over time by subject


@dataclass(frozen=True)
class FoundFile:
    """A NIfTI file below a subject's folder; ``image_id`` is empty when none can be told."""

    path: Path
    subject: str
    image_id: str


@dataclass(frozen=True)
class Reading:
    """Scan records, and what was wrong with them or with rows of the table."""

    records: list[ScanRecord]
    problems: list[Problem]


def discover(root: Path) -> list[FoundFile]:
    """All NIfTI files below folders named after a subject, by subject and image ID.

    Raises:
        FolderError: no such folder, or nothing found in it.
    """
    if not root.is_dir():
        raise FolderError(
            "NO_FOLDER",
            "no such folder" if not root.exists() else "a file, not a folder",
            str(root),
            "give the folder that holds the download; `python -m datamodules synth DIR` makes one",
        )
    others: Counter[str] = Counter()
    found = []
    for path in _walk(root):
        subject = _subject_of(path, root)
        if subject and _SUFFIX.search(path.name):
            found.append(FoundFile(path, subject, _image_id(path)))
        else:
            others[path.suffix.lower() or path.name] += 1
    if not found:
        seen = ", ".join(f"{n} x {suffix}" for suffix, n in others.most_common(5)) or "no files"
        dicom = "convert the DICOM files first (dcm2niix, or choose NiFTI in the portal)"
        unpack = "unpack the download there, or give the folder that holds it"
        raise FolderError(
            "NO_SCANS",
            f"no .nii or .nii.gz file below a folder named like 123_S_0456; what is there: {seen}",
            str(root),
            dicom if others[".dcm"] else unpack,
        )
    # the order must not depend on how the download was unpacked
    return sorted(found, key=lambda file: (file.subject, file.image_id, file.path))


def _walk(root: Path) -> Iterator[Path]:
    visited: set[str] = set()  # links may lead in circles
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited or TRUTH_MARKER in files:
            folders.clear()
            continue
        visited.add(real)
        folders.sort()
        # names with a leading dot: macOS resource forks and unfinished copies
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _subject_of(path: Path, root: Path) -> str:
    parts = (root.resolve().name, *path.relative_to(root).parts[:-1])
    names = [part.upper() for part in parts if PTID.fullmatch(part.upper())]
    return names[-1] if names else ""


def _image_id(path: Path) -> str:
    in_name = _ID_IN_NAME.search(_SUFFIX.sub("", path.name))
    in_folder = _ID_FOLDER.fullmatch(path.parent.name)
    match = in_name or in_folder
    return f"I{match.group(1)}" if match else ""


def is_t1(description: str) -> bool:
    """Whether a series description names a T1-weighted image of the whole head."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", description)
    return bool(_T1.search(name)) and not _NOT_T1.search(name)


def read_ida(
    found: Sequence[FoundFile],
    collection: Collection,
    task: Task,
    histories: Histories | None = None,
) -> Reading:
    """Join the files that ``discover`` found with their rows and label them for ``task``.

    Without ``histories`` the diagnosis is the research group of the collection table, with them it
    is that of the visit nearest to the scan, seen in the light of all others.
    """
    copies = Counter(file.image_id for file in found)
    problems: list[Problem] = []
    records = []
    for file in found:
        row = collection.rows.get(file.image_id)
        problem = _identity_problem(file, row, copies, collection.path)
        if problem is not None:
            records.append(replace(_bare(file), problem=problem.code))
            problems.append(problem)
        elif row is not None:
            records.append(_labelled(file, row, task, collection.path, histories))
    problems += _unknown_labels(records, collection)
    records = _choose_series(records)
    records, conflicts = _label_conflicts(records, task)
    missing = _rows_without_scan(collection, {file.image_id for file in found})
    return Reading(records, [*problems, *conflicts, *missing])


def _bare(file: FoundFile) -> ScanRecord:
    status = file.path.stat()
    return ScanRecord(
        subject=file.subject,
        image_id=file.image_id,
        path=str(file.path),
        site=file.subject[:3],
        bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def _identity_problem(
    file: FoundFile, row: CollectionRow | None, copies: Counter[str], table: Path
) -> Problem | None:
    def problem(code: str, detail: str, action: str) -> Problem:
        return Problem(code, detail, action, str(file.path), file.subject, file.image_id)

    if not file.image_id:
        return problem(
            "NO_IMAGE_ID",
            "neither the file name ends in _I<number> nor is the folder named I<number>",
            "restore the name the portal gave it",
        )
    if copies[file.image_id] > 1:
        return problem(
            "DUPLICATE_ID",
            f"{copies[file.image_id]} files carry the image ID {file.image_id}",
            "keep one of them",
        )
    if row is None:
        return problem(
            "NO_ROW",
            f"no row for this image in {table.name}",
            "export the table of the collection this scan belongs to, or remove the scan",
        )
    if row.subject != file.subject:
        return problem(
            "SUBJECT_MISMATCH",
            f"the table says {row.subject} (line {row.line})",
            "find out whose scan it is before using it",
        )
    return None


def _labelled(
    file: FoundFile, row: CollectionRow, task: Task, table: Path, histories: Histories | None
) -> ScanRecord:
    dx = diagnosis(row.group)
    reason = ""
    source = f"{table.name}:Group={row.group}"
    if histories is not None:
        history = histories.get(row.subject, [])
        day = row.acquired
        dx, reason = label_scan(history, day) if history and day else ("", "missing")
        source = f"history of {len(history)} visits"
    record = replace(
        _bare(file),
        session=row.visit,
        description=row.description,
        dx=dx or "",
        dx_source=source,
        dx_bl=row.group,
        label=task.label(dx) if dx else None,
        age=row.age,
        sex=row.sex,
        acq_date=row.acquired.isoformat() if row.acquired else "",
    )
    if not is_t1(row.description):
        return replace(record, reason="not_t1")
    if reason:
        return replace(record, reason=reason)
    if dx is None:
        return replace(record, problem="UNKNOWN_LABEL")
    if record.label is None:
        return replace(record, reason="smc" if dx == "SMC" else "not_in_task")
    return record


def _unknown_labels(records: Sequence[ScanRecord], collection: Collection) -> Iterator[Problem]:
    """One problem for each unknown group: whole collections say ``Patient`` in every row."""
    groups: dict[str, list[CollectionRow]] = defaultdict(list)
    for record in records:
        if record.problem == "UNKNOWN_LABEL":
            row = collection.rows[record.image_id]
            groups[row.group].append(row)
    for group, rows in groups.items():
        first = min(rows, key=lambda row: row.line)
        yield Problem(
            "UNKNOWN_LABEL",
            f"group {group!r} is none of {known_words()}",
            "give the diagnoses (ADNIMERGE) with --data.diagnosis_csv / --diagnosis-csv, "
            "or correct the table",
            f"{collection.path}, line {first.line}",
            first.subject,
            first.image_id,
            len(rows),
        )


def _preference(record: ScanRecord) -> tuple[int, int]:
    """Smaller is better: scaled, then N3-corrected, then original, then a repeated series."""
    name = re.sub(r"[^0-9A-Za-z]+", "_", record.description).lower()
    if name.endswith("repeat") or name.startswith("mpr_r"):
        rank = 3
    elif re.search(r"scaled(_2)?$", name):
        rank = 0
    else:
        rank = 1 if re.search(r"n3m?$", name) else 2
    return rank, int(record.image_id[1:])


def _choose_series(records: list[ScanRecord]) -> list[ScanRecord]:
    """Keep one series per subject and day; the others are excluded, with the winner's name."""
    best: dict[tuple[str, str], ScanRecord] = {}
    for record in sorted((r for r in records if r.used), key=_preference):
        best.setdefault((record.subject, record.acq_date or record.image_id), record)
    chosen = []
    for record in records:
        winner = best.get((record.subject, record.acq_date or record.image_id))
        if record.used and winner is not None and winner.image_id != record.image_id:
            record = replace(record, reason=f"other_series:{winner.image_id}")
        chosen.append(record)
    return chosen


def _label_conflicts(
    records: list[ScanRecord], task: Task
) -> tuple[list[ScanRecord], list[Problem]]:
    labels: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.used:
            labels[record.subject].add(record.dx)
    torn = {subject: names for subject, names in labels.items() if len(names) > 1}
    problems, marked = [], []
    for record in records:
        if record.used and record.subject in torn:
            record = replace(record, problem="LABEL_CONFLICT")
            names = " and ".join(sorted(torn[record.subject]))
            detail = f"the subject is {names} in the task {task.name}; here: {record.dx_source}"
            action = "correct the table, or leave the subject out"
            who = (record.path, record.subject, record.image_id)
            problems.append(Problem("LABEL_CONFLICT", detail, action, *who))
        marked.append(record)
    return marked, problems


def _rows_without_scan(collection: Collection, present: set[str]) -> Iterator[Problem]:
    for row in collection.rows.values():
        if row.image_id not in present and is_t1(row.description):
            yield Problem(
                NO_SCAN,
                f"a row ({row.description}, {row.format or 'no format given'}) without a file",
                "download the rest of the collection (NiFTI), or remove the row",
                f"{collection.path}, line {row.line}",
                row.subject,
                row.image_id,
            )
