"""Scans as the LONI portal (IDA) delivers them.

The levels below a subject's folder have changed over the years, so they are not relied on: a scan
is a NIfTI file anywhere below a folder named after a subject, and its image ID stands at the end
of its name (or names the folder it lies in). Everything else is asked of the collection table.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import NO_SCAN, FolderError, Problem, TableError
from ..records import ScanRecord
from ..series import is_t1
from .aibl import aibl_subject
from .clinical import Clinical
from .collection import Collection, CollectionRow, find_collection
from .ids import PTID, canonical_session
from .reading import Reading
from .scanner import in_xml
from .tree import bare_record, is_nifti, require_folder, stem, walk, what_is_there, what_to_do

_ID_IN_NAME = re.compile(r"_I(\d+)$")
_ID_FOLDER = re.compile(r"I(\d+)")
_AIBL_NAME = re.compile(r"AIBL_(\d+)_MR_")


@dataclass(frozen=True)
class FoundFile:
    """A NIfTI file below a subject's folder.

    Attributes:
        path: of the file.
        subject: canonical PTID, from the name of the folder.
        image_id: with its letter; empty when none can be told.
    """

    path: Path
    subject: str
    image_id: str


def find_ida(root: Path) -> bool:
    """Whether a NIfTI file lies below a folder named after a subject."""
    return any(is_nifti(path) and _subject_of(path, root) for path in walk(root))


def discover(root: Path) -> list[FoundFile]:
    """All NIfTI files below folders named after a subject, by subject and image ID.

    Raises:
        FolderError: no such folder, or nothing found in it.
    """
    require_folder(root)
    found = [
        FoundFile(path, subject, _image_id(path))
        for path in walk(root)
        if is_nifti(path) and (subject := _subject_of(path, root))
    ]
    if not found:
        seen = what_is_there(root)
        raise FolderError(
            "NO_SCANS",
            "no .nii or .nii.gz file below a folder like 123_S_0456, or named AIBL_12_MR_...; "
            f"what is there: {seen}",
            str(root),
            what_to_do(seen),
        )
    # the order must not depend on how the download was unpacked
    return sorted(found, key=lambda file: (file.subject, file.image_id, file.path))


def _subject_of(path: Path, root: Path) -> str:
    """The PTID of a folder; of AIBL, whose folders have a number, that of the file's name."""
    parts = (root.resolve().name, *path.relative_to(root).parts[:-1])
    names = [part.upper() for part in parts if PTID.fullmatch(part.upper())]
    found = _AIBL_NAME.match(path.name)
    return names[-1] if names else aibl_subject(found[1]) if found else ""


def _image_id(path: Path) -> str:
    in_name = _ID_IN_NAME.search(stem(path))
    in_folder = _ID_FOLDER.fullmatch(path.parent.name)
    match = in_name or in_folder
    return f"I{match.group(1)}" if match else ""


def read_ida(
    root: Path,
    found: Sequence[FoundFile],
    collection_csv: Path | None = None,
    clinical: Clinical | None = None,
) -> Reading:
    """Join the files that ``discover`` found with their rows in the collection table.

    Raises:
        TableError: the collection table is missing, ambiguous or not understood, or it has no
            groups and there are no diagnoses over time either.
    """
    collection = find_collection(root, collection_csv)
    if clinical is None and not collection.has_groups:
        raise TableError(
            "BAD_TABLE",
            "no column group, and no diagnoses over time",
            str(collection.path),
            "give ADNIMERGE or DXSUM with --data.diagnosis_csv / --diagnosis-csv, or export the "
            "table with the research group",
        )
    copies = Counter(file.image_id for file in found)
    problems: list[Problem] = []
    records = []
    for file in found:
        row = collection.rows.get(file.image_id)
        problem = _identity_problem(file, row, copies, collection.path)
        record = bare_record(file.path, file.subject, file.image_id, "ida")
        if problem is not None:
            records.append(replace(record, problem=problem.code))
            problems.append(problem)
        elif row is not None:
            records.append(_described(record, row, collection.path))
    if not any(record.scanner for record in records):
        records = list(_with_metadata(root, records))
    problems += _rows_without_scan(root, collection, {file.image_id for file in found})
    groups = f"{collection.path.name}:Group"
    return Reading("ida", records, problems, clinical, groups, (collection.path,), collection.notes)


def _described(record: ScanRecord, row: CollectionRow, table: Path) -> ScanRecord:
    return replace(
        record,
        row=f"{table}, line {row.line}",
        session=canonical_session(row.visit) or row.visit,
        description=row.description,
        dx_source=f"{table.name}:Group={row.group}",
        dx_bl=row.group,
        age=row.age,
        sex=row.sex,
        field_strength=row.field_strength,
        phase=row.phase,
        scanner=row.scanner,
        acq_date=row.acquired.isoformat() if row.acquired else "",
        reason="" if is_t1(row.description) else "not_t1",
    )


def _with_metadata(root: Path, records: Sequence[ScanRecord]) -> Iterator[ScanRecord]:
    """The scanners, from the portal's metadata, which are unpacked beside the scans."""
    files = {_image_id(path.with_suffix("")): path for path in walk(root) if path.suffix == ".xml"}
    for record in records:
        path = files.get(record.image_id) if record.image_id else None
        yield replace(record, scanner=in_xml(path)) if path else record


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


def _rows_without_scan(root: Path, collection: Collection, present: set[str]) -> Iterator[Problem]:
    rows = [
        row
        for row in collection.rows.values()
        if row.image_id not in present and is_t1(row.description)
    ]
    instead = _other_files(root) if rows else {}
    for row in rows:
        kinds = instead.get(row.image_id, Counter())
        what, action = "without a file", "download the rest of the collection (NiFTI)"
        if kinds:
            what = f"with {', '.join(f'{n} x {kind}' for kind, n in kinds.most_common(3))} instead"
            how = "; ".join(_CONVERSIONS[kind] for kind in kinds if kind in _CONVERSIONS)
            action = f"convert what lies there{f' ({how})' if how else ''}, or download it as NiFTI"
        yield Problem(
            NO_SCAN,
            f"a row ({row.description}, {row.format or 'no format given'}) {what}",
            f"{action}, or remove the row",
            f"{collection.path}, line {row.line}",
            row.subject,
            row.image_id,
        )


_CONVERSIONS = {
    ".dcm": ".dcm: dcm2niix",
    ".mgz": ".mgz: mri_convert",
    ".mgh": ".mgh: mri_convert",
    ".zip": ".zip: unpack it",
    ".img": ".hdr and .img: fslchfiletype NIFTI_GZ",
}


def _other_files(root: Path) -> dict[str, Counter[str]]:
    """Kinds of files that are no NIfTI, by the image ID of their name or folder."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for path in walk(root):
        image_id = "" if is_nifti(path) else _image_id(path.with_suffix(""))
        if image_id:
            kinds[image_id][path.suffix.lower() or "file without suffix"] += 1
    return kinds
