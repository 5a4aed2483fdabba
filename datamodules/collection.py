"""The portal's collection table: which image belongs to whom."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path

from .errors import TableError
from .tables import Table, read_table

REQUIRED = ("imagedataid", "subject", "group", "description", "acqdate")
PTID = re.compile(r"\d{3}_S_\d{4,5}")  # five digits since ADNI4
_DATE_FORMATS = ("%m/%d/%Y", "%Y-%m-%d")  # the portal's own, and what spreadsheets make of it


@dataclass(frozen=True)
class CollectionRow:
    """One row of the collection table. ``image_id`` has its letter, ``acquired`` may be None."""

    image_id: str
    subject: str
    group: str
    sex: str
    age: float | None
    visit: str
    description: str
    type: str
    acquired: date | None
    format: str
    line: int


@dataclass(frozen=True)
class Collection:
    """A collection table by image ID."""

    path: Path
    encoding: str
    rows: dict[str, CollectionRow]


def find_collection(root: Path, given: Path | None = None) -> Collection:
    """Read the collection table that is given, or the only one directly in ``root``.

    Raises:
        TableError: none, several, or one that cannot be understood.
    """
    if given is not None:
        return read_collection(given)
    tables = sorted(path for path in root.glob("*") if path.suffix.lower() == ".csv")
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
            "name the one that belongs to these scans with collection_csv",
        )
    found = "; ".join(reasons) if reasons else "no .csv file at all"
    above = sorted(root.parent.glob("*.csv"))
    hint = f" (perhaps {above[0]})" if above else ""
    raise TableError(
        "NO_TABLE",
        f"no collection table directly in the folder: {found}",
        str(root),
        f"put the collection's CSV there, or name it with collection_csv{hint}",
    )


def read_collection(path: Path) -> Collection:
    """Read one collection table.

    Raises:
        TableError: see ``read_table``; also rows without a subject or image ID, one image ID in
            two rows that differ, dates that cannot be read.
    """
    table = read_table(path, REQUIRED)
    date_format = _date_format(table)
    rows: dict[str, CollectionRow] = {}
    for values, line in zip(table.rows, table.lines):
        row = _parse(path, values, line, date_format)
        earlier = rows.setdefault(row.image_id, row)
        if (earlier.subject, earlier.group) != (row.subject, row.group):
            raise TableError(
                "DUPLICATE_ID",
                f"image {row.image_id} is {earlier.subject} ({earlier.group}) in line "
                f"{earlier.line} and {row.subject} ({row.group}) in line {line}",
                str(path),
                "remove the wrong row",
            )
    return Collection(path, table.encoding, rows)


def _parse(path: Path, values: dict[str, str], line: int, date_format: str) -> CollectionRow:
    number = values["imagedataid"].upper().lstrip("ID")
    subject = values.get("subject", "").upper()
    if not number.isdigit() or not PTID.fullmatch(subject):
        raise TableError(
            "BAD_ROW",
            f"line {line}: image {values['imagedataid']!r} of subject {subject!r}",
            str(path),
            "an image ID is I and digits, a subject 3 digits, _S_ and 4 or 5 digits",
        )
    day = values.get("acqdate", "")
    age = values.get("age", "")
    return CollectionRow(
        image_id=f"I{number}",
        subject=subject,
        group=values.get("group", ""),
        sex={"f": "F", "female": "F", "m": "M", "male": "M"}.get(values.get("sex", "").lower(), ""),
        age=float(age) if re.fullmatch(r"\d+(\.\d+)?", age) else None,
        visit=values.get("visit", ""),
        description=values.get("description", ""),
        type=values.get("type", ""),
        acquired=datetime.strptime(day, date_format).date() if day else None,
        format=values.get("format", ""),
        line=line,
    )


def _date_format(table: Table) -> str:
    """One format for the whole column: 4/5/2006 and 2006-04-05 in one table would be guesswork."""
    days = [row.get("acqdate", "") for row in table.rows]
    for candidate in _DATE_FORMATS:
        if all(_reads(day, candidate) for day in days if day):
            return candidate
    first = _DATE_FORMATS[0]
    line, value = _first_unreadable(zip(table.lines, days), first)
    raise TableError(
        "BAD_DATE",
        f"line {line}: acquisition date {value!r}",
        str(table.path),
        "dates must all be month/day/year, as the portal writes them, or all YYYY-MM-DD",
    )


def _first_unreadable(days: Iterable[tuple[int, str]], date_format: str) -> tuple[int, str]:
    return next((line, day) for line, day in days if day and not _reads(day, date_format))


def _reads(day: str, date_format: str) -> bool:
    try:
        datetime.strptime(day, date_format)
    except ValueError:
        return False
    return True
