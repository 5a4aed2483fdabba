"""Diagnoses of AIBL, as its study data come from the portal: one table for each instrument.

``aibl_pdxconv`` has the diagnosis of each visit (``DXCURREN`` 1 healthy, 2 MCI, 3 AD) and no date;
dates stand in the tables of scans and tests. A visit is dated by its scan, if there is one: scans
are then found by their own day. ``-4`` is no value. Age and sex stand in the collection's table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from ..cells import quantity_in
from ..dates import dates_in
from ..errors import TableError
from ..progression import FORGOTTEN, Visit, nominal_day
from ..tables import MISSING, Table, read_table
from .clinical import Clinical, Person, dated_together
from .ids import canonical_session

_DIAGNOSES = "aibl_pdxconv"
_DATED = ("mri3meta", "mrimeta", "mmse", "cdr", "neurobat")
_CODES = {"1": "NC", "2": "MCI", "3": "AD"}
_Visit = tuple[str, str]  # person, session


def find_aibl(where: Path) -> Path | None:
    """The folder of the tables: this one, or one or two below; None: they are not there."""
    if where.is_file():
        return where.parent if where.name.lower().startswith(_DIAGNOSES) else None
    for pattern in ("*.csv", "*/*.csv", "*/*/*.csv"):
        for path in sorted(where.glob(pattern)):
            if path.name.lower().startswith(_DIAGNOSES):
                return path.parent
    return None


def aibl_subject(number: str) -> str:
    """``AIBL_5`` for number 5 of the study; empty for what is no number."""
    digits = number.strip().removesuffix(".0")
    return f"AIBL_{int(digits)}" if digits.isdigit() else ""


def read_aibl(folder: Path) -> Clinical:
    """All visits of the study.

    Raises:
        TableError: one cannot be understood, or there are several releases of one.
    """
    days: dict[_Visit, date] = {}
    for name in _DATED:
        if table := _table(folder, name):
            dates = dates_in(table, "examdate")
            for visit, row in _visits(table):
                if day := dates.day(row.get("examdate", "")):
                    days.setdefault(visit, day)
    scores = {
        visit: quantity_in(row.get("mmscore", ""), "mmse") for visit, row in _rows(folder, "mmse")
    }
    table = _table(folder, "pdxconv")
    assert table is not None
    seen: dict[str, list[Visit]] = defaultdict(list)
    sites: dict[str, str] = {}
    for visit, row in _visits(table):
        who, session = visit
        day = days.get(visit)
        sites[who] = row.get("siteid", "")
        seen[who].append(
            Visit(
                day or nominal_day(session) or FORGOTTEN,
                _dx(table, row),
                session=session,
                mmse=scores.get(visit),
                dated=day is not None,
            )
        )
    persons = {who: Person(dated_together(own), site=sites[who]) for who, own in seen.items()}
    return Clinical(table.path, f"{table.path.name}:DXCURREN", persons)


def _table(folder: Path, name: str) -> Table | None:
    found = [
        path
        for path in sorted(folder.glob("*.csv"))
        if path.name.lower().removesuffix(".csv").split("_")[:2] == ["aibl", name]
    ]
    if len(found) > 1:
        raise TableError(
            "SEVERAL_TABLES",
            f"{len(found)} releases of aibl_{name}: {', '.join(path.name for path in found)}",
            str(folder),
            "keep those of one release in the folder",
        )
    return read_table(found[0], ("rid", "viscode")) if found else None


def _rows(folder: Path, name: str) -> Iterator[tuple[_Visit, dict[str, str]]]:
    table = _table(folder, name)
    return _visits(table) if table else iter(())


def _visits(table: Table) -> Iterator[tuple[_Visit, dict[str, str]]]:
    for row in table.rows:
        who, session = aibl_subject(row["rid"]), canonical_session(row["viscode"])
        if who and session:
            yield (who, session), row


def _dx(table: Table, row: dict[str, str]) -> str:
    code = row.get("dxcurren", "").removesuffix(".0")
    if code.lower() in MISSING:
        return ""
    if code not in _CODES:
        raise TableError(
            "UNKNOWN_LABEL",
            f"RID {row['rid']}, {row['viscode']}: DXCURREN {code!r} is none of 1, 2, 3 and -4",
            str(table.path),
            "correct the table, or export it again",
        )
    return _CODES[code]
