"""Scans listed in a table of one's own: ``path``, ``subject``, ``label``.

A table of diagnoses takes the place of ``label``. Paths are relative to the table. Labels are
words: NC, AD, MCI, sMCI, pMCI and their usual synonyms. Further columns are used when they are
there: ``image_id``, ``session``, ``age``, ``sex``, ``mmse``, ``cdr_sb``, ``apoe4`` (0 to 2),
``site``, ``phase``, ``field_strength``, ``acq_date``, ``registered`` (yes or no), ``description``
(name of the series), ``cohort``, ``scanner`` (or ``manufacturer`` and ``model``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PureWindowsPath

from ..cells import Cells
from ..dates import dates_in
from ..errors import NO_SCAN, FolderError, Problem
from ..records import ScanRecord
from ..series import is_t1
from ..tables import normalise, read_table
from .clinical import Clinical
from .ids import canonical_session
from .people import Names
from .reading import Reading
from .scanner import scanner_in
from .tree import bare_record, stem

REQUIRED = ("path", "subject", "label")
_OTHERS = {"imageid", "session", "site", "phase", "cohort", "acqdate", "registered", "description"}
_OTHERS |= {"scanner", "manufacturer", "manufacturersmodelname", "mfg", "mfgmodel", "model"}


def plain_folders(table: Path) -> list[Path]:
    """The folders that hold the listed scans."""
    rows = read_table(table, REQUIRED[:1]).rows
    return sorted({(table.parent / row["path"]).parent for row in rows})


def read_plain(table: Path, clinical: Clinical | None, names: Names) -> Reading:
    """The listed scans; their labels, unless a table of diagnoses says them.

    Raises:
        FolderError: none of the listed files exists.
        TableError: see ``read_table``; also unreadable dates.
    """
    aliases = {"label": (normalise(names.label_column),)} if names.label_column else {}
    read = read_table(table, REQUIRED[: 3 if clinical is None else 2], aliases)
    dates = dates_in(read, "acqdate")
    cells = Cells(table.name, read.rows, read.lines)
    paths = [_path(table, row["path"]) for row in read.rows]
    copies = Counter(map(os.path.realpath, paths))  # one file, however it is written
    records, problems = [], []
    for values, line, path in zip(read.rows, read.lines, paths):
        subject = names.person(values.get("subject", ""))
        name = values.get("imageid") or f"{subject}_{stem(path)}"
        where = f"{table}, line {line}"
        if not path.is_file():
            action = "correct the path, which is relative to the table, or remove the row"
            problems.append(Problem(NO_SCAN, f"no file {path}", action, where, subject, name))
            continue
        problem = ""
        rows = copies[os.path.realpath(path)]
        if not subject or rows > 1:
            problem = "BAD_ROW" if not subject else "DUPLICATE_ID"
            found = "no subject" if not subject else f"{rows} rows for this file"
            problems.append(Problem(problem, found, "correct the table", where, subject, name))
        day = dates.day(values.get("acqdate", ""))
        record = replace(
            bare_record(path, subject, name, "csv"),
            row=where,
            dx_source=f"{table.name}:label={values.get('label', '')}",
            acq_date=day.isoformat() if day else "",
            problem=problem,
        )
        record = _with_columns(record, values, names, cells)
        if not record.session:
            record = replace(record, session=names.session(values.get("subject", "")))
        records.append(record)
    if not records:
        raise FolderError(
            "NO_SCANS",
            f"none of {len(read.rows)} listed files exists, the first is {read.rows[0]['path']}, "
            f"looked for at {paths[0]}",
            str(table),
            "correct the paths, which are relative to the table; a drive of Windows (D:\\\\) lies "
            "elsewhere here",
        )
    lost = (*cells.notes(), *cells.not_there({*REQUIRED, *_OTHERS}))
    notes = tuple(note for note in (read.note, dates.note, *lost) if note)
    return Reading("csv", records, problems, clinical, f"{table.name}:label", (table,), notes)


def _path(table: Path, cell: str) -> Path:
    """A file of a table, by one name; Windows' paths are read where nothing else lies there."""
    path = table.parent / cell
    if "\\" in cell and not path.exists():
        path = table.parent / PureWindowsPath(cell).as_posix()
    return Path(os.path.normpath(path.absolute()))


def _with_columns(
    record: ScanRecord, values: Mapping[str, str], names: Names, cells: Cells
) -> ScanRecord:
    """A record, with what the further columns say."""
    subject, registered = record.subject, values.get("registered", "").lower()
    return replace(
        record,
        session=canonical_session(values.get("session", "")) or values.get("session", ""),
        description=values.get("description", "") or "T1w",
        reason="" if is_t1(values.get("description", "") or "T1w") else "not_t1",
        dx_bl=names.word(values.get("label", "")),
        age=cells.number(values, "age"),
        sex=cells.sex(values),
        site=values.get("site", "") or subject[:3] * (subject[3:6] == "_S_"),
        mmse=cells.number(values, "mmse"),
        cdr_sb=cells.number(values, "cdr_sb"),
        apoe4=cells.alleles(values),
        phase=values.get("phase", ""),
        cohort=values.get("cohort", ""),
        scanner=scanner_in(values),
        field_strength=cells.number(values, "field_strength"),
        registered=registered if registered in ("yes", "no") else "",
    )
