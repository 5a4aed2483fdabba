"""Scans in a BIDS folder as ``clinica convert adni-to-bids`` writes it.

``sub-<id>/ses-<id>/anat/*_T1w.nii[.gz]``; beside it ``participants.tsv`` and in each session a
``*_scans.tsv`` with ``scan_id`` (the image ID) and ``mri_field``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..cells import Cells, quantity_in
from ..errors import FolderError, TableError
from ..records import ScanRecord
from ..tables import MISSING, normalise, one_row_each, read_table
from .clinical import Clinical
from .ids import canonical_session, canonical_subject, image_number
from .people import Names, refuse_other_spelling
from .reading import Reading
from .scanner import header_of_scan, scanner_name
from .tree import bare_record, is_nifti, require_folder, stem, what_is_there

_SCANS = "sub-*/ses-*/anat/*_T1w.nii*", "sub-*/anat/*_T1w.nii*"


def find_bids(root: Path) -> bool:
    """Whether T1-weighted scans lie where BIDS wants them."""
    return any(True for _ in _scans(root))


def _scans(root: Path) -> Iterator[Path]:
    for pattern in _SCANS:
        yield from (p for p in root.glob(pattern) if is_nifti(p) and not p.name.startswith("."))


def read_bids(root: Path, clinical: Clinical | None, names: Names) -> Reading:
    """All T1-weighted scans with what the tables of the folder say about them.

    Raises:
        FolderError: no such folder, or no scans in it.
        TableError: neither sessions nor participants have a diagnosis.
    """
    require_folder(root)
    paths = sorted(_scans(root))
    if not paths:
        raise FolderError(
            "NO_SCANS",
            f"no sub-*/ses-*/anat/*_T1w.nii.gz; what is there: {what_is_there(root)}",
            str(root),
            "give the BIDS folder itself, the one with participants.tsv",
        )
    table = root / "participants.tsv"
    people = _participants(table) if table.is_file() else {}
    column = _label_column(people, names)
    if column is None and (clinical is None or names.label_column):
        header = ", ".join(next(iter(people.values()), ({}, 0))[0]) or "no participants.tsv"
        wanted = names.label_column or "diagnosis_sc, diagnosis_bl, diagnosis or group"
        raise TableError(
            "NO_TABLE",
            f"no sub-*/*_sessions.tsv with diagnoses, and no {wanted} in participants.tsv; its "
            f"columns are: {header}",
            str(root),
            "name the column of the labels with --data.label_column / --label-column, or give "
            "ADNIMERGE or DXSUM with --data.diagnosis_csv / --diagnosis-csv",
        )
    rows, lines = [row for row, _ in people.values()], [line for _, line in people.values()]
    cells = Cells(table.name, rows, lines, ("age",))
    records = [_record(path, table, people, names, column or "", root, cells) for path in paths]
    refuse_other_spelling((f"sub-{_subject(path)}" for path in paths), people, str(table))
    groups = f"participants.tsv:{column}"
    notes = cells.notes()
    if clinical is None:  # tables of sessions may say the age
        notes += cells.not_there({"participantid", "originalstudy", column or ""})
    tables = (table,) if table.is_file() else ()
    return Reading("bids", records, [], clinical, groups, tables, tuple(notes))


# other parts of a complex image, and images with a contrast agent
_OTHER_IMAGE = re.compile(r"_part-(?!mag)|_ce-(?!none)|_desc-(?:brain)?mask")
_ENTITY = re.compile(r"(?:^|_)([a-z]+)-([0-9A-Za-z]+)")
_People = dict[str, tuple[dict[str, str], int]]


def _participants(table: Path) -> _People:
    """The row of each subject, and its line."""
    read = read_table(table, ("participantid",))
    return one_row_each(read, lambda row: canonical_subject(row["participantid"]))


_LABELS = ("diagnosissc", "diagnosisbl", "diagnosis", "group", "dx")


def _label_column(people: _People, names: Names) -> str | None:
    """The normalised name of the column with a diagnosis for each person."""
    columns = set().union(*(row for row, _ in people.values()))
    wanted = (normalise(names.label_column),) if names.label_column else _LABELS
    return next((column for column in wanted if column in columns), None)


def _record(
    path: Path,
    table: Path,
    people: _People,
    names: Names,
    column: str,
    root: Path,
    cells: Cells,
) -> ScanRecord:
    """A scan, with what tables and headers say of it."""
    parts = dict(_ENTITY.findall(stem(path)))
    name = f"sub-{_subject(path)}"
    # names of OASIS-3 leave the session to the folder
    session = parts.get("ses", "") or path.parent.parent.name.removeprefix("ses-") * (
        path.parent.parent.name[:4] == "ses-"
    )
    row, line = people.get(canonical_subject(name), ({}, 0))
    about = _about(path)
    image_id = image_number(about.get("scanid", ""))
    image = f"I{image_id}" if image_id else stem(path).removesuffix("_T1w")
    group = names.word(row.get(column, ""))
    header = {key: str(value) for key, value in header_of_scan(path, root).items()}
    tesla = about.get("mrifield", "") or header.get("MagneticFieldStrength", "")
    return replace(
        bare_record(path, names.person(name), image, "bids"),
        row=f"{table}, line {line}" if line else "",
        session=canonical_session(session) or session,
        description=stem(path).split("_", 2)[-1] if "run-" in path.name else "T1w",
        reason="not_t1" if _OTHER_IMAGE.search(path.name) else "",
        dx_bl="" if group.lower() in MISSING else group,
        dx_source=f"participants.tsv:{column}={row.get(column, '')}",
        # at the first visit, where no table of sessions says more
        age=cells.number(row, "age"),
        sex=cells.sex(row),
        field_strength=quantity_in(tesla, "field_strength"),
        phase=row.get("originalstudy", ""),
        scanner=scanner_name(
            header.get("Manufacturer", ""), header.get("ManufacturersModelName", "")
        ),
    )


def _subject(path: Path) -> str:
    """What follows ``sub-`` in the name of a file; the standard allows letters and digits alone."""
    return re.sub(r"^sub-|_.*", "", path.name)


def _about(path: Path) -> dict[str, str]:
    """The row of a scan in its session's table."""
    for table in sorted(path.parent.parent.glob("*_scans.tsv")):
        for row in read_table(table, ("filename",)).rows:
            if row["filename"].rpartition("/")[2] == path.name:
                return {k: "" if v.lower() in MISSING else v for k, v in row.items()}
    return {}
