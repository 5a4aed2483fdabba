"""Diagnoses of OASIS-3: the forms B4 (CDR) and D1 (diagnoses) of the Uniform Data Set.

Days are counted from each person's entry, of visits (``days_to_visit``) and of scans (``d0129``),
which are made at other times: a scan has the nearest visit. D1 says what somebody has (``NORMCOG``,
``MCIAMEM``, ``DEMENTED`` and why); where it is missing, the words of B4 do (``dx1``), which know no
MCI. A dementia of another cause is ``OD``, as in other tables; what is neither (impairment that is
no MCI, "uncertain dementia") is ``other``: of no class, and no control at other visits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from os.path import commonpath
from pathlib import Path

from ..cells import number_in
from ..progression import FORGOTTEN, OTHER_DEMENTIA, Visit
from ..tables import header_of, read_table
from .clinical import Clinical, Person
from .ids import canonical_subject
from .tree import walk

_WITHIN_DAYS = 365  # what the study itself proposes for matching visits and scans
_FORMS = {
    "D1": {"oasisid", "normcog"},
    "B4": {"oasisid", "cdrtot"},
    "people": {"oasisid", "gender"},
    "old": {"adrcadrcclinicaldataid", "subject", "dx1"},  # one table, until 2022
}
_OLD_NAMES = {
    "oasisid": ("subject",),
    "cdrtot": ("cdr",),
    "cdrsum": ("sumbox",),
    "oasissessionlabel": ("adrcadrcclinicaldataid",),
    "ageatvisit": ("age",),
}
_MCI = {"mciamem", "mciaplus", "mcinon1", "mcinon2"}
_CAUSES = {"probad": "probadif", "possad": "possadif", "alzdis": "alzdisif"}
_NOT_THE_FIRST = ("2", "3")  # contributing, non-contributing
_DEMENTED = re.compile(r"\bdem|\bdlbd\b|\bdat\b")  # "Non AD dem", "Vascular Demt", "Dementia/PD"
_UNCERTAIN = re.compile(r"unc|incip|no\b|\d")  # "Unc: ques. Impairment", "0.5 in memory only"
_SEX = {"1": "M", "2": "F", "m": "M", "f": "F"}


def find_uds(where: Path, everywhere: bool) -> dict[str, Path]:
    """The forms below a folder by kind, or the one that is given; empty without B4 and D1.

    Args:
        where: a table, or a folder.
        everywhere: look at all depths, and not only into the study's folder of tables.
    """
    if where.is_file():
        tables = [where]
    elif everywhere:
        tables = [path for path in walk(where) if path.suffix.lower() == ".csv"]
    else:
        below = [p for name in ("OASIS3_data_files*", "0AS_data_files*") for p in where.glob(name)]
        tables = [path for folder in below for path in walk(folder) if path.suffix == ".csv"]
        tables += sorted(where.glob("*.csv"))
    found = {kind: path for path in tables if (kind := _kind(path))}
    return found if found.keys() & {"D1", "B4", "old"} else {}


def _kind(path: Path) -> str:
    header = header_of(path)
    return next((kind for kind, columns in _FORMS.items() if columns <= header), "")


def read_uds(forms: dict[str, Path]) -> Clinical:
    """All visits of the study.

    Raises:
        TableError: a form cannot be read.
    """
    seen: dict[tuple[str, int], Visit] = {}
    for kind in ("D1", "B4", "old"):  # D1 says more
        for person, days, row in _visits(forms.get(kind), kind):
            names = ("ageatvisit", "mmse", "cdrsum")
            age, mmse, cdr_sb = (number_in(row.get(name, "")) for name in names)
            dx = _of_flags(row) if kind == "D1" else _of_words(row)
            day = FORGOTTEN + timedelta(days=days)
            first = seen.get((person, days), Visit(day, "", f"d{days:04d}", age, dated=False))
            seen[person, days] = replace(first, dx=first.dx or dx, mmse=mmse, cdr_sb=cdr_sb)
    visits: dict[str, list[Visit]] = defaultdict(list)
    for (person, _), visit in sorted(seen.items(), key=lambda item: item[0]):
        visits[person].append(visit)
    people = _people(forms.get("people"))
    persons = {
        person: Person(tuple(own), *people.get(person, ("", "", "", None)))
        for person, own in visits.items()
    }
    tables = [forms[kind].name for kind in ("D1", "B4", "old") if kind in forms]
    found = Counter(visit.dx for own in visits.values() for visit in own)
    notes = []
    if found["OD"]:
        notes.append(f"{found['OD']} visits with a dementia of another cause; {OTHER_DEMENTIA}")
    if found["other"]:
        notes.append(f"{found['other']} visits with an impairment that is no MCI and no dementia")
    if "D1" not in forms:
        notes.append(f"{tables[0]} knows no MCI; the form D1 (OASIS3_UDSd1_diagnoses.csv) does")
    folder = Path(commonpath(forms.values()))
    return Clinical(
        folder.parent if folder.name == "scans" else folder,
        " and ".join(tables),
        persons,
        tuple(notes),
        within_days=_WITHIN_DAYS,
    )


def _visits(path: Path | None, kind: str) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Person, day and row of each visit."""
    if path is None:
        return
    for row in read_table(path, ("oasisid",), _OLD_NAMES if kind == "old" else {}).rows:
        text = row.get("daystovisit", "")
        label = re.search(r"_d(\d+)$", row.get("oasissessionlabel", ""))
        number = number_in(text)
        days = int(number) if number is not None else int(label[1]) if label else None
        if days is not None:
            yield canonical_subject(row["oasisid"]), days, row


def _of_flags(row: dict[str, str]) -> str:
    """The diagnosis of a form D1."""
    flags = {name for name, value in row.items() if value.removesuffix(".0") == "1"}
    if "normcog" in flags:
        return "NC"
    if "demented" in flags:
        alzheimer = any(
            cause in flags and row.get(role, "").removesuffix(".0") not in _NOT_THE_FIRST
            for cause, role in _CAUSES.items()
        )
        return "AD" if alzheimer else "OD"
    if flags & _MCI:
        return "MCI"
    return "other" if "impnomci" in flags else ""


def _of_words(row: dict[str, str]) -> str:
    """The diagnosis of a form B4: ``Cognitively normal``, ``AD dem w/...``, ``DAT`` and so on."""
    words = row.get("dx1", "").strip().lower()
    if words in ("", ".", "na", "n/a"):
        return ""
    if words in ("cognitively normal", "no dementia"):
        return "NC" if (number_in(row.get("cdrtot", "")) or 0) == 0 else "other"
    if re.match(r"(ad|dat)\b(?!.*cannot be primary)", words):
        return "AD"
    return "OD" if _DEMENTED.search(words) and not _UNCERTAIN.match(words) else "other"


def _people(path: Path | None) -> dict[str, tuple[str, str, str, int | None]]:
    """Sex, group, site and e4 alleles of each person; group and site are not known."""
    rows = read_table(path, ("oasisid",)).rows if path else ()
    found: dict[str, tuple[str, str, str, int | None]] = {}
    for row in rows:
        genes = row.get("apoe", "").removesuffix(".0")
        alleles = genes.count("4") if re.fullmatch(r"[234]{2}", genes) else None
        sex = _SEX.get(row.get("gender", "").removesuffix(".0").lower(), "")
        found[canonical_subject(row["oasisid"])] = (sex, "", "", alleles)
    return found
