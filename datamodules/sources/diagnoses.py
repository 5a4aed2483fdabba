"""Which tables say what people had: of AIBL, of OASIS-3, one's own, or of ADNI and Clinica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..cells import Cells
from ..errors import TableError
from ..labels import diagnosis, known_words
from ..progression import FORGOTTEN, Visit
from ..tables import MISSING, header_of, normalise, one_row_each, read_table
from .aibl import find_aibl, read_aibl
from .clinical import Clinical, Person, find_clinical
from .people import Names
from .uds import find_uds, read_uds

_PERSON = ("subject", "subjectid", "participantid", "patientid", "patient")
_LABEL = ("label", "diagnosis", "group", "dx")
_VISITS = {"sessionid", "session", "viscode", "viscode2", "examdate", "path"}


def find_diagnoses(root: Path | None, given: Path | None, names: Names) -> Clinical | None:
    """Read the tables that are given, or those in ``root``; None without any.

    Raises:
        TableError: several, or one that cannot be understood.
    """
    where = given or root
    if where is not None:
        if aibl := find_aibl(where):
            return read_aibl(aibl)
        if forms := find_uds(where, everywhere=given is not None):
            return read_uds(forms)
    if given is not None and given.is_file() and _columns(given, names):
        return _read_people(given, names)
    return find_clinical(root, given, names)


def _columns(path: Path, names: Names) -> tuple[str, str] | None:
    """The columns of person and diagnosis in a table with one row for each person."""
    header = header_of(path)
    person = next((name for name in _PERSON if name in header), "")
    wanted = (normalise(names.label_column),) if names.label_column else _LABEL
    label = next((name for name in wanted if name in header), "")
    return (person, label) if person and label and not header & _VISITS else None


def _read_people(path: Path, names: Names) -> Clinical:
    """A table of one's own: who has what, with age and sex where they are known."""
    columns = _columns(path, names)
    assert columns is not None
    person, label = columns
    table = read_table(path, columns)
    cells = Cells(path.name, table.rows, table.lines, ("age", "mmse"))
    told = []
    for row, line in zip(table.rows, table.lines):
        name = names.person(row.get(person, ""))
        numbers = {key: cells.number(row, key) for key in ("age", "mmse")}
        said = {key: "" if value is None else f"{value:g}" for key, value in numbers.items()}
        dx = _diagnosis(path, line, name, row.get(label, ""), names)
        told.append({"subject": name, label: dx, "sex": cells.sex(row), **said})
    rows = one_row_each(replace(table, rows=tuple(told)), lambda row: row["subject"])
    people = {}
    for name, (row, _) in rows.items():
        age, mmse = (float(row[key]) if row[key] else None for key in ("age", "mmse"))
        visit = Visit(FORGOTTEN, row[label], age=age, mmse=mmse, dated=False)
        people[name] = Person((visit,), row["sex"], row[label])
    people.pop("", None)
    lost = (*cells.notes(), *cells.not_there({*columns, *_PERSON, *_LABEL}))
    notes = tuple(note for note in (table.note, *lost) if note)
    return Clinical(path, f"{path.name}:{label}", people, notes, final=True, for_all_scans=True)


def _diagnosis(path: Path, line: int, name: str, word: str, names: Names) -> str:
    dx = "" if word.lower() in MISSING else diagnosis(names.word(word))
    if dx is None:
        raise TableError(
            "UNKNOWN_LABEL",
            f"line {line}: {name} is {word!r}, and known are {known_words()}",
            str(path),
            "correct it, or say what the word means with --data.label_map / --label-map",
        )
    return dx
