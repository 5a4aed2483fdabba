"""Diagnoses over time: ADNIMERGE, DXSUM, and the tables that Clinica writes.

The kind of a table is told by its columns, never by its name: the portal renames its tables and
adds dates to their names.

* ADNIMERGE: ``PTID, EXAMDATE, DX``. Older releases write ``MCI to Dementia``: the state at that
  visit is the word after "to".
* DXSUM: ``DIAGNOSIS`` (1 normal, 2 MCI, 3 demented, or words), and in older releases ``DXCHANGE`` 1
  to 9 (ADNIGO/2) and ``DXCURREN`` 1 to 3 (ADNI1). Those releases know the subject by RID alone.
* Clinica: ``participant_id, session_id, diagnosis``, in one table of ``clinica iotools merge-tsv``
  or in the ``*_sessions.tsv`` and ``participants.tsv`` of a BIDS folder. Lists of ClinicaDL look
  the same and hold conclusions (``sMCI``, ``pMCI``, or a column ``progression``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path

from ..cells import Cells
from ..dates import dates_in, find_dates
from ..errors import TableError
from ..labels import CONCLUSIONS, diagnosis, known_words
from ..progression import FORGOTTEN as _FORGOTTEN
from ..progression import OTHER_DEMENTIA, Visit
from ..progression import nominal_day as _nominal
from ..records import natural
from ..tables import MISSING, Table, header_of, one_row_each, read_table
from .ids import canonical_session, canonical_subject, registry_number
from .people import Names

_CODES = {"1": "NC", "2": "MCI", "3": "AD"}
# the state that a change ends in: stable, conversions 4 to 6, reversions 7 to 9
_CHANGES = dict(zip("123456789", ["NC", "MCI", "AD", "MCI", "AD", "AD", "NC", "MCI", "NC"]))
_PROGRESSIONS = {"s": "sMCI", "p": "pMCI", "r": "rMCI", "uk": "uMCI", "us": "uMCI"}
_DAYS = ("examinationdate", "acqtime", "examdate", "date")
_SUFFIXES = (".csv", ".tsv", ".txt", ".xls", ".xlsx")
# the names under which the portal gives them; its dictionaries describe columns
_NAME = re.compile(r"(?!.*dict)(adnimerge|dxsum)", re.IGNORECASE)
# of ADNIMERGE2: one row for each person, with the diagnosis at enrolment
_PEOPLE = re.compile(r"(?!.*dict)adsl", re.IGNORECASE)
_ADSL = {"usubjid", "dx", "enrldt"}


@dataclass(frozen=True)
class Person:
    """What the tables say about one subject.

    Attributes:
        visits: all, those without a diagnosis too.
        sex: F, M or empty.
        dx_bl: research group, or the group at screening, as the table writes it.
        site: number of the clinical site.
        apoe4: number of e4 alleles; None: not known.
    """

    visits: tuple[Visit, ...]
    sex: str = ""
    dx_bl: str = ""
    site: str = ""
    apoe4: int | None = None


@dataclass(frozen=True)
class Clinical:
    """Diagnoses over time, by subject.

    Attributes:
        path: the table, or the BIDS folder.
        source: file and column of the diagnoses, for messages.
        persons: by canonical ID, or by ``RID <number>`` in tables that know no more.
        notes: what was read in an unusual way.
        final: whether the diagnoses are conclusions (stable or progressive MCI) and no diagnoses at
            a visit; they are used as they are.
        for_all_scans: whether a person has one diagnosis, which holds for every scan.
        within_days: how far a scan may be from its visit, where the study has visits and scans at
            other times; None: as the rule of the labels says.
    """

    path: Path
    source: str
    persons: dict[str, Person] = field(repr=False)
    notes: tuple[str, ...] = ()
    final: bool = False
    for_all_scans: bool = False
    within_days: int | None = None

    @property
    def says(self) -> str:
        """Where labels come from, for people."""
        if self.for_all_scans:
            return f"{self.source}, one for each person"
        if self.within_days:
            return (
                f"{self.source}, at the visit nearest to each scan, {self.within_days} days at most"
            )
        return f"{self.source}, at the visit of each scan"

    def person(self, subject: str) -> Person | None:
        """The person with this canonical ID."""
        return self.persons.get(subject) or self.persons.get(f"RID {registry_number(subject)}")


def find_clinical(
    root: Path | None,
    given: Path | None,
    names: Names = Names(),  # noqa: B008 (frozen)
) -> Clinical | None:
    """Read the table that is given, or the only one directly in ``root``; None without any.

    Raises:
        TableError: several, one that cannot be understood, or a file named ADNIMERGE or DXSUM that
            is none.
    """
    if given is not None:
        return read_clinical(given, names)
    if root is None:
        return None
    files = sorted(path for path in root.glob("*") if path.suffix.lower() in _SUFFIXES)
    kinds = {path: _kind(header_of(path)) for path in files}
    people = [p for p in files if kinds[p] == "adsl" or (not kinds[p] and _PEOPLE.match(p.name))]
    tables = [path for path in files if kinds[path] and path not in people] or people
    people = [path for path in people if path not in tables]
    for path in files:
        if path not in tables and _NAME.match(path.name):
            # says why not: other labels must not stand in for these in silence
            read_clinical(path, names)
    if len(tables) > 1:
        raise TableError(
            "SEVERAL_TABLES",
            f"{len(tables)} tables of diagnoses: {', '.join(path.name for path in tables)}",
            str(root),
            "name the one to use with --data.diagnosis_csv / --diagnosis-csv",
        )
    if tables:
        found = read_clinical(tables[0], names)
        for path in people:
            found = _with_people(found, path, kinds[path])
        return found
    return _read_bids_tables(root, names) if any(root.glob("sub-*/*_sessions.tsv")) else None


def read_clinical(path: Path, names: Names = Names()) -> Clinical:  # noqa: B008 (frozen)
    """Read one table of diagnoses, or the tables of a BIDS folder.

    Raises:
        TableError: see ``read_table``; also unknown diagnoses and unreadable dates.
    """
    if path.is_dir():
        return _read_bids_tables(path, names)
    table = read_table(path, ())
    kind = _kind(set(table.rows[0]))
    if kind == "adnimerge":
        return _adnimerge(table)
    if kind == "dxsum":
        return _dxsum(table)
    if kind == "adsl":
        return _adsl(table)
    if kind == "sessions":
        return _clinica(path, table.rows, [(table, row, n) for row, n in _numbered(table)], names)
    if _PEOPLE.match(path.name):
        raise TableError(
            "BAD_TABLE",
            "a table with one row for each person, without DX and ENRLDT",
            str(path),
            "export ADSL with both, put DXSUM of the same release beside it, or move it away to go "
            "on without diagnoses",
        )
    raise TableError(
        "BAD_TABLE",
        f"no table of diagnoses; the header is: {', '.join(table.rows[0])[:300]}",
        str(path),
        "give ADNIMERGE (PTID, EXAMDATE, DX), DXSUM (RID or PTID, EXAMDATE, DIAGNOSIS, DXCHANGE or "
        "DXCURREN), a table or a BIDS folder of Clinica (participant_id, session_id, diagnosis), "
        "or a table of people (subject, label)",
    )


def _kind(columns: set[str]) -> str:
    if {"ptid", "dx", "examdate"} <= columns:
        return "adnimerge"
    if columns >= _ADSL:
        return "adsl"
    if columns & {"diagnosis", "dxchange", "dxcurren"}:
        if {"participantid", "sessionid"} <= columns:
            return "sessions"
        if columns & {"rid", "ptid"} and columns & {"viscode", "viscode2", "examdate"}:
            return "dxsum"
    return ""


def _numbered(table: Table) -> Iterable[tuple[dict[str, str], int]]:
    return zip(table.rows, table.lines)


def _adnimerge(table: Table) -> Clinical:
    dates = dates_in(table, "examdate")
    cells = Cells(table.path.name, table.rows, table.lines)
    persons: dict[str, Person] = {}
    visits: dict[str, list[Visit]] = defaultdict(list)
    start: dict[str, date] = {}
    for row, line in _numbered(table):
        subject = canonical_subject(row.get("ptid", ""))
        day = dates.day(row.get("examdate", ""))
        if day is None:
            continue
        start[subject] = min(day, start.get(subject, day))
        dx = _word(table, line, row, "dx")
        visits[subject].append(
            Visit(
                day,
                dx,
                session=canonical_session(row.get("viscode", "")),
                age=cells.number(row, "age"),  # at baseline, until all visits are known
                mmse=cells.number(row, "mmse"),
                cdr_sb=cells.number(row, "cdr_sb"),
                phase=_known(row, "colprot"),
                field_strength=cells.number(row, "field_strength"),
            )
        )
        persons[subject] = _described(row, cells, "dxbl")
    for subject, person in persons.items():
        seen = tuple(_aged(visit, start[subject]) for visit in visits[subject])
        persons[subject] = replace(person, visits=seen)
    return Clinical(
        table.path, f"{table.path.name}:DX", persons, _notes(table.note, dates.note, *cells.notes())
    )


def _adsl(table: Table) -> Clinical:
    """One visit for each person: the diagnosis at enrolment, and nothing of what came later."""
    dates = dates_in(table, "enrldt")
    cells = Cells(table.path.name, table.rows, table.lines, ("age",))
    persons = {}
    for row, line in one_row_each(table, lambda row: row["usubjid"]).values():
        day = dates.day(row["enrldt"])
        if day is None:  # never enrolled, and so without a diagnosis
            continue
        visit = Visit(
            day, _word(table, line, row, "dx"), session="M000", age=cells.number(row, "age")
        )
        # ADNI-<site>-<RID with zeros>
        number = _whole(row["usubjid"].rpartition("-")[2])
        persons[f"RID {number}"] = replace(
            _described({**row, "site": row.get("siteid", "")}, cells, "dx"), visits=(visit,)
        )
    note = (
        f"{table.path.name}: one diagnosis for each person, at enrolment; who changed later is not "
        "known from it (DXSUM of the same release says)"
    )
    return Clinical(
        table.path, f"{table.path.name}:DX", persons, _notes(table.note, note, *cells.notes())
    )


def _with_people(found: Clinical, path: Path, kind: str) -> Clinical:
    """Diagnoses over time, with age, sex and site from a table of people where they have none."""
    if not kind:
        note = f"{path.name}: not used, it has no DX and ENRLDT"
        return replace(found, notes=(*found.notes, note))
    people, persons = read_clinical(path), {}
    for subject, person in found.persons.items():
        known = people.person(subject)
        if known is not None:
            first = known.visits[0]
            visits = tuple(
                _aged(replace(v, age=first.age), first.day) if v.dated and v.age is None else v
                for v in person.visits
            )
            person = replace(
                person,
                sex=person.sex or known.sex,
                site=person.site or known.site,
                visits=visits,
            )
        persons[subject] = person
    note = f"{path.name}: age, sex and site where {found.path.name} has none"
    return replace(found, persons=persons, notes=(*found.notes, note))


def _notes(*notes: str) -> tuple[str, ...]:
    return tuple(note for note in notes if note)


def _described(row: dict[str, str], cells: Cells, group: str) -> Person:
    """What a row says about the person; the column of the group has this name."""
    return Person(
        (), cells.sex(row), _known(row, group), _whole(_known(row, "site")), cells.alleles(row)
    )


def _aged(visit: Visit, start: date) -> Visit:
    """ADNIMERGE gives the age at baseline in every row."""
    if visit.age is None:
        return visit
    return replace(visit, age=round(visit.age + (visit.day - start).days / 365.25, 1))


def _dxsum(table: Table) -> Clinical:
    dates = dates_in(table, "examdate")
    visits: dict[str, list[Visit]] = defaultdict(list)
    for row, line in _numbered(table):
        subject = canonical_subject(_known(row, "ptid")) or f"RID {_whole(row.get('rid', ''))}"
        session = next(
            (s for c in ("viscode2", "viscode") if (s := canonical_session(_known(row, c)))), ""
        )
        day = dates.day(row.get("examdate", ""))
        if day is None and not session:
            continue
        visits[subject].append(
            Visit(
                day or _nominal(session) or _FORGOTTEN,
                _caused(_dxsum_state(table, line, row), row),
                session=session,
                phase=_known(row, "colprot") or _known(row, "phase"),
                dated=day is not None,
            )
        )
    persons = {subject: Person(dated_together(seen)) for subject, seen in visits.items()}
    source = f"{table.path.name}:DIAGNOSIS"
    other = [sum(visit.dx == "OD" for visit in seen) for seen in visits.values()]
    note = (
        f"{table.path.name}: {sum(other)} visits of {sum(map(bool, other))} people are dementia of "
        f"another cause (DXDDUE 2); {OTHER_DEMENTIA}"
    )
    return Clinical(
        table.path, source, persons, _notes(table.note, dates.note, note if any(other) else "")
    )


def _dxsum_state(table: Table, line: int, row: dict[str, str]) -> str:
    current = _known(row, "diagnosis") or _known(row, "dxcurren")
    change = _known(row, "dxchange")
    if not _known(row, "diagnosis") and change:
        return _CHANGES.get(_whole(change)) or _word(table, line, row, "dxchange")
    column = "diagnosis" if _known(row, "diagnosis") else "dxcurren"
    return _CODES.get(_whole(current)) or _word(table, line, row, column)


def _caused(dx: str, row: dict[str, str]) -> str:
    """A dementia, or one of another cause than Alzheimer's disease."""
    return "OD" if dx == "AD" and _whole(_known(row, "dxddue")) == "2" else dx


def _read_bids_tables(root: Path, names: Names) -> Clinical:
    files = sorted(root.glob("sub-*/*_sessions.tsv"))
    if not files:
        raise TableError(
            "NO_TABLE",
            "no sub-*/*_sessions.tsv",
            str(root),
            "give the BIDS folder that `clinica convert adni-to-bids` wrote, or ADNIMERGE or DXSUM",
        )
    tables = [(path.parent.name, read_table(path, ("sessionid",))) for path in files]
    rows = [
        (table, {"participantid": name, **row}, line)
        for name, table in tables
        for row, line in _numbered(table)
    ]
    participants = root / "participants.tsv"
    people: list[dict[str, str]] = []
    if participants.is_file():
        read = read_table(participants, ("participantid",))
        people = [row for row, _ in one_row_each(read, lambda r: r["participantid"]).values()]
    return _clinica(root, people, rows, names)


def _clinica(
    path: Path,
    people: Sequence[dict[str, str]],
    rows: Iterable[tuple[Table, dict[str, str], int]],
    names: Names,
) -> Clinical:
    visits: dict[str, list[Visit]] = defaultdict(list)
    rows = list(rows)
    column = next((c for c in _DAYS if any(c in row for _, row, _ in rows)), _DAYS[0])
    dates = find_dates(((t.path, line, row.get(column, "")) for t, row, line in rows), column)
    cells = Cells(path.name, [row for _, row, _ in rows], [line for _, _, line in rows])
    for table, row, line in rows:
        name = row["sessionid"].strip()
        session = canonical_session(name) or name.removeprefix("ses-")
        day = dates.day(row.get(column, ""))
        if not session and day is None:
            continue
        nominal = _nominal(session)
        visits[names.person(row["participantid"])].append(
            Visit(
                day or nominal or _FORGOTTEN,
                _concluded(_word(table, line, row, "diagnosis", names), row),
                session=session,
                age=cells.number(row, "age"),
                mmse=cells.number(row, "mmse"),
                cdr_sb=cells.number(row, "cdr_sb"),
                phase=_known(row, "currentstudy"),
                field_strength=cells.number(row, "field_strength"),
                dated=day is not None,
                timed=(day or nominal) is not None,
            )
        )
    of_people = Cells(path.name, people, range(len(people)), ("apoe4",))
    described = {names.person(row["participantid"]): row for row in people}
    persons = {
        subject: replace(
            _described(described.get(subject, {}), of_people, "diagnosissc"),
            visits=dated_together(seen),
        )
        for subject, seen in visits.items()
    }
    final = any(visit.dx in CONCLUSIONS for seen in visits.values() for visit in seen)
    source = f"{path.name}:diagnosis" + (" (final classes)" if final else "")
    return Clinical(path, source, persons, _notes(dates.note, *cells.notes()), final)


def _concluded(dx: str, row: dict[str, str]) -> str:
    """What became of an MCI, where a list of ClinicaDL says it in a column of its own."""
    word = _known(row, "progression").lower()
    return _PROGRESSIONS.get(word, dx) if dx == "MCI" else dx


def dated_together(visits: list[Visit]) -> tuple[Visit, ...]:
    """Days of one person's visits on one scale: real ones and nominal ones do not mix.

    An undated visit is placed by its month from a dated one; without any, all stay nominal. If the
    sessions name no time at all, only their order is known.
    """
    if not any(visit.dated for visit in visits):
        if all(visit.timed for visit in visits):
            return tuple(visits)
        names = sorted({visit.session for visit in visits}, key=natural)
        days = {name: _FORGOTTEN + timedelta(days=n) for n, name in enumerate(names)}
        return tuple(replace(v, day=days[v.session], timed=False) for v in visits)
    anchors = ((v, _nominal(v.session)) for v in visits if v.dated and v.session)
    anchor = next(((v, nominal) for v, nominal in anchors if nominal), None)
    if anchor is None:
        return tuple(visit for visit in visits if visit.dated)
    shift = anchor[0].day - anchor[1]
    return tuple(
        v if v.dated else replace(v, day=v.day + shift) for v in visits if v.dated or v.timed
    )


def _known(row: dict[str, str], column: str) -> str:
    value = row.get(column, "")
    return "" if value.lower() in MISSING else value


def _whole(text: str) -> str:
    """``0295`` and ``295.0``, as spreadsheets and pandas save numbers, are 295."""
    return text.strip().removesuffix(".0").lstrip("0")


def _word(
    table: Table,
    line: int,
    row: dict[str, str],
    column: str,
    names: Names = Names(),  # noqa: B008
) -> str:
    """The diagnosis in a cell, empty for a missing one."""
    word = names.word(_known(row, column)).lower().rpartition(" to ")[2]
    dx = diagnosis(word) if word else ""
    if dx is None:
        alike = sum(other.get(column, "") == row[column] for other in table.rows)
        raise TableError(
            "UNKNOWN_LABEL",
            f"line {line}: {column} {row[column]!r} is none of {known_words()}; "
            f"{alike} rows have it",
            str(table.path),
            "say what it means with --data.label_map / --label-map WORD=DIAGNOSIS, or correct it",
        )
    return dx
