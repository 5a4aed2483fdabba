"""The portal's collection table: which image belongs to whom."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ..cells import Cells, quantity_in
from ..dates import Dates, dates_in
from ..errors import TableError
from ..tables import read_table
from .aibl import aibl_subject
from .ids import adni_subject, image_number
from .scanner import scanner_in

REQUIRED = ("imagedataid", "subject", "description")
# a collection's CSV, the advanced search's, and the portal's image tables since October 2024
_ALIASES = {
    "imagedataid": ("imageid", "imageuid", "loniimage"),
    "subject": ("subjectid", "ptid"),
    "group": ("researchgroup",),
    "description": ("imagedescription", "seriesdescription"),
    "acqdate": ("studydate", "imagedate", "acquisitiondate", "scandate"),
    "visit": ("imagevisit", "viscode2", "viscode"),
    "type": ("imagetype",),
    "field": ("fieldstrength", "mfgfieldstrength"),
}
_CLINICAL = ("adnimerge", "dxsum", "adsl")


@dataclass(frozen=True)
class CollectionRow:
    """One row of the collection table.

    Attributes:
        image_id: with its letter, e.g. ``I9000001``.
        subject: canonical PTID.
        group: research group, as the table writes it.
        sex: F, M or empty.
        age: in years; None: not known.
        visit: as the table writes it.
        description: of the series.
        acquired: day of the scan; None: the cell is empty.
        format: of the file, as the table writes it.
        field_strength: tesla; None: not known.
        phase: as the table writes it.
        scanner: manufacturer and model; empty: not known.
        line: number of its line in the file.
    """

    image_id: str
    subject: str
    group: str
    sex: str
    age: float | None
    visit: str
    description: str
    acquired: date | None
    format: str
    field_strength: float | None
    phase: str
    scanner: str
    line: int


@dataclass(frozen=True)
class Collection:
    """A collection table.

    Attributes:
        path: of the table.
        rows: by image ID.
        notes: what was read in an unusual way.
        has_groups: whether there is a column of research groups.
    """

    path: Path
    rows: dict[str, CollectionRow]
    notes: tuple[str, ...] = ()
    has_groups: bool = True


def find_collection(root: Path, given: Path | None = None) -> Collection:
    """Read the collection table that is given, or the only one directly in ``root``.

    Clinical tables (ADNIMERGE, DXSUM) beside it do no harm.

    Raises:
        TableError: none, several, or one that cannot be understood.
    """
    if given is not None:
        return read_collection(given)
    tables = _tables_in(root)
    if len(tables) == 1:
        return read_collection(tables[0])
    good: list[Collection] = []
    reasons: list[str] = []
    for path in tables:
        try:
            good.append(read_collection(path))
        except TableError as error:
            reasons.append(f"{path.name}: {error.found}")
    if len(good) == 1:
        return good[0]
    if good:
        names = ", ".join(collection.path.name for collection in good)
        raise TableError(
            "SEVERAL_TABLES",
            f"{len(good)} collection tables: {names}",
            str(root),
            "name the one of these scans with --data.collection_csv / --collection-csv",
        )
    clinical = [path.name for path in _csv_files(root) if _is_clinical(path)]
    reasons += [f"{name} holds diagnoses, not images" for name in clinical]
    found = "; ".join(reasons) if reasons else "no .csv file at all"
    above = _tables_in(root.parent)
    hint = f" (perhaps {above[0]})" if above else ""
    raise TableError(
        "NO_TABLE",
        f"no collection table directly in the folder: {found}",
        str(root),
        "put the collection's CSV there, or name it with --data.collection_csv / --collection-csv"
        + hint,
    )


def _tables_in(folder: Path) -> list[Path]:
    """CSV files that may be a collection table: all but the clinical ones, by their usual names."""
    return [path for path in _csv_files(folder) if not _is_clinical(path)]


def _csv_files(folder: Path) -> list[Path]:
    """The CSV files directly in a folder."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() == ".csv")


def _is_clinical(path: Path) -> bool:
    return path.name.lower().startswith(_CLINICAL)


def read_collection(path: Path) -> Collection:
    """Read one collection table.

    Raises:
        TableError: see ``read_table``; also rows without a subject or image ID, one image ID in
            two rows that differ, dates that cannot be read.
    """
    table = read_table(path, REQUIRED, _ALIASES)
    dates = dates_in(table, "acqdate")
    cells = Cells(path.name, table.rows, table.lines, ("age",))
    rows: dict[str, CollectionRow] = {}
    for values, line in zip(table.rows, table.lines):
        row = _parse(path, values, line, dates, cells)
        earlier = rows.setdefault(row.image_id, row)
        if (earlier.subject, earlier.group) != (row.subject, row.group):
            raise TableError(
                "DUPLICATE_ID",
                f"image {row.image_id} is {earlier.subject} ({earlier.group}) in line "
                f"{earlier.line} and {row.subject} ({row.group}) in line {line}",
                str(path),
                "remove the wrong row",
            )
    notes = tuple(note for note in (table.note, dates.note, *cells.notes()) if note)
    return Collection(path, rows, notes, "group" in table.rows[0])


def _parse(
    path: Path, values: dict[str, str], line: int, dates: Dates, cells: Cells
) -> CollectionRow:
    number = image_number(values["imagedataid"])
    whose = values.get("subject", "")
    subject = adni_subject(whose) or aibl_subject(whose)
    if not number or not subject:
        raise TableError(
            "BAD_ROW",
            f"line {line}: image {values['imagedataid']!r} of subject {whose!r}",
            str(path),
            "an image ID is I and digits, a subject like 123_S_0456 or, of AIBL, a number",
        )
    return CollectionRow(
        image_id=f"I{number}",
        subject=subject,
        group=values.get("group", ""),
        sex=cells.sex(values),
        age=cells.number(values, "age"),
        visit=values.get("visit", ""),
        description=values.get("description", ""),
        acquired=dates.day(values.get("acqdate", "")),
        format=values.get("format", ""),
        field_strength=_tesla(values.get("field") or values.get("imagingprotocol", "")),
        phase=values.get("phase", ""),
        scanner=scanner_in(values),
        line=line,
    )


def _tesla(text: str) -> float | None:
    """Field strength: a number, or ``Field Strength=3.0`` among other settings."""
    match = re.search(r"field strength\s*=\s*([^;]*)", text, re.IGNORECASE)
    return quantity_in(match[1] if match else text, "field_strength")
