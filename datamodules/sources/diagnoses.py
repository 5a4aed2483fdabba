"""Which tables say what people had: of AIBL, of OASIS-3, one's own, or of ADNI and Clinica."""

from __future__ import annotations

from pathlib import Path

from ..cells import quantity_in, sex_in
from ..errors import TableError
from ..labels import diagnosis, known_words
from ..progression import FORGOTTEN, Visit
from ..tables import MISSING, header_of, normalise, read_table
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
    people: dict[str, Person] = {}
    for row, line in zip(table.rows, table.lines):
        word = row.get(label, "")
        dx = "" if word.lower() in MISSING else diagnosis(names.word(word))
        name = names.person(row.get(person, ""))
        twice = name in people and people[name].dx_bl != dx
        if dx is None or twice:
            known = people[name].dx_bl if twice else known_words()
            found = (
                f"line {line}: {name} is {word!r}, and {'was' if twice else 'known are'} {known}"
            )
            action = "correct it, or say what the word means with --data.label_map / --label-map"
            raise TableError("BAD_ROW" if twice else "UNKNOWN_LABEL", found, str(path), action)
        age, mmse = (quantity_in(row.get(column, ""), column) for column in ("age", "mmse"))
        visit = Visit(FORGOTTEN, dx, age=age, mmse=mmse, dated=False)
        people[name] = Person((visit,), sex_in(row.get("sex", "")), dx)
    source = f"{path.name}:{label}"
    notes = (table.note,) if table.note else ()
    return Clinical(path, source, people, notes, final=True, for_all_scans=True)
