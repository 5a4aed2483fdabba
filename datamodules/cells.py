"""What cells of tables say of people, and an account of those that say nothing.

People write numbers in many ways: ``71,5``, ``082Y``, ``3T``, ``89+``. What can mean one thing
only is read; what cannot, or is no number that people have (an age of 999), is not known, and the
account says how many cells that are: a column that is lost in silence takes its p-value along.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .tables import MISSING


@dataclass(frozen=True)
class Quantity:
    """A column of numbers.

    Attributes:
        columns: its normalised names.
        low: smallest number that somebody has.
        high: largest.
        units: regular expression of what may stand behind the number.
    """

    columns: tuple[str, ...]
    low: float
    high: float
    units: str = ""


QUANTITIES = {
    "age": Quantity(
        ("age", "agebl", "ageatscan", "ageatvisit", "ageyears", "patientage", "patientsage"),
        1,
        115,
        r"y|y\.?o\.?|yrs?\.?|years?( old)?|j\.?|jahre|ans|años",
    ),
    "mmse": Quantity(
        ("mmse", "mmsescore", "mmsetotal"), 0, 30, r"(/|of|von|sur|de) ?30|points?|pts?\.?|punkte"
    ),
    "cdr_sb": Quantity(("cdrsb", "cdrsob"), 0, 18),
    "apoe4": Quantity(("apoe4",), 0, 2),
    "field_strength": Quantity(
        ("fieldstrength", "fldstreng", "mrifield", "magneticfieldstrength", "tesla"),
        0.05,
        15,
        "t|t mri|tesla( mri)?",
    ),
}
SEX = ("sex", "gender", "ptgender", "patientsex", "patientssex")
_NUMBER = re.compile(r"['+~<>≤≥]?=?\s*(?P<n>\d+([.,]\d*)?)\s*\+?\s*(?P<unit>.*)")
_OPEN = re.compile(r"^[<>≤≥]|\d\s*\+")
_SEXES = {
    **dict.fromkeys(("f", "female", "w", "woman", "weiblich"), "F"),
    **dict.fromkeys(("m", "male", "man", "männlich"), "M"),
}
_ISO_SEXES = {"1": "M", "2": "F"}
"""ISO/IEC 5218, and ADNI's; 0 and 9 are not known there."""
_OLDEST = 95.0  # people who are older than that are rare, and of several ages
_ALONE = 3.0  # years below a code of a missing value, such as 99, in which nobody is


def sex_in(text: str) -> str:
    """F, M or empty."""
    return _SEXES.get(_plain(text), "")


def number_in(text: str) -> float | None:
    """The number that a cell is; None for any other text."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def quantity_in(text: str, name: str) -> float | None:
    """The number that a cell of a quantity is; None for one that nobody has, or any other text."""
    match = _NUMBER.fullmatch(_plain(text))
    kind = QUANTITIES[name]
    if match is None or (match["unit"] and not re.fullmatch(kind.units, match["unit"])):
        return None
    number = float(match["n"].replace(",", "."))
    return number if kind.low <= number <= kind.high else None


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    return "".join(c for c in text if unicodedata.category(c) != "Cf").strip().lower()


def _repeated(ages: Sequence[float]) -> float | None:
    """An age that is a code of a missing value: the highest, of several rows, nobody near it."""
    most = max(ages, default=0.0)
    near = [age for age in ages if age >= most - _ALONE]
    return most if most > _OLDEST and len(near) > 1 and set(near) == {most} else None


class Cells:
    """The rows of one kind of table, read together: what a column means is seen in all of it.

    Args:
        where: name of the table, for notes.
        rows: cells by normalised column.
        lines: number of each row in the file.
        names: of the quantities that are looked for; sex always is.
    """

    def __init__(
        self,
        where: str,
        rows: Sequence[Mapping[str, str]],
        lines: Iterable[int],
        names: Sequence[str] = tuple(QUANTITIES),
    ) -> None:
        self._where, self._lines, self._names = where, list(lines), names
        self._rows = rows
        sexes = {_whole(cell) for row in rows if (cell := _cell(row, SEX))}
        self._iso = "2" in sexes and sexes <= {"0", "1", "2", "9"}
        ages = [quantity_in(_cell(row, QUANTITIES["age"].columns), "age") for row in rows]
        self._code = _repeated([age for age in ages if age is not None])

    def sex(self, row: Mapping[str, str]) -> str:
        """F, M or empty."""
        cell = _cell(row, SEX)
        return _ISO_SEXES.get(_whole(cell), "") if self._iso else sex_in(cell)

    def number(self, row: Mapping[str, str], name: str) -> float | None:
        """A quantity of a row; None: not known."""
        value = quantity_in(_cell(row, QUANTITIES[name].columns), name)
        return None if name == "age" and value == self._code else value

    def alleles(self, row: Mapping[str, str]) -> int | None:
        """Number of APOE e4 alleles; None: not known."""
        value = self.number(row, "apoe4")
        return None if value is None else int(value)

    def unread(self, row: Mapping[str, str]) -> dict[str, str]:
        """The cells of a row that say something and were not read, by name."""
        values = {name: self.number(row, name) for name in self._names} | {"sex": self.sex(row)}
        cells = {name: _cell(row, _columns(name)) for name in values}
        return {name: cell for name, cell in cells.items() if cell and values[name] in ("", None)}

    def notes(self) -> list[str]:
        """An account of the cells that were not read, or in a way that has to be said."""
        found = []
        lost = [self.unread(row) for row in self._rows]
        for name in ("sex", *self._names):
            title, of = f"{self._where}: {name.replace('_', ' ')}", len(lost)
            if numbers := [n for n, cells in enumerate(lost) if name in cells]:
                first = f"{lost[numbers[0]][name]!r} (line {self._lines[numbers[0]]})"
                found.append(f"{title}: {len(numbers)} of {of} not read, for example {first}")
            if ends := [c for row in self._rows if _OPEN.search(c := _cell(row, _columns(name)))]:
                found.append(f"{title}: {len(ends)} of {of} open, {ends[0]!r} read as its number")
        if self._iso:
            found.append(f"{self._where}: sex: 1 is read as male and 2 as female (ISO/IEC 5218)")
        return found

    def not_there(self, used: Iterable[str]) -> list[str]:
        """A note where nothing says the age or the sex, with the columns that nothing is read from.

        Args:
            used: normalised names of the columns that are read for other things.
        """
        columns = set().union(*self._rows)
        known = {*used, *SEX, *(c for kind in QUANTITIES.values() for c in kind.columns)}
        gone = [name for name in ("age", "sex") if not columns & {*_columns(name)}]
        rest = ", ".join(sorted(columns - known)[:10])
        if not gone or not rest:
            return []
        return [f"{self._where}: no column {' or '.join(gone)}; columns not used: {rest}"]


def _columns(name: str) -> tuple[str, ...]:
    return SEX if name == "sex" else QUANTITIES[name].columns


def _cell(row: Mapping[str, str], columns: Sequence[str]) -> str:
    """The first of these columns that says something."""
    cells = (row.get(column, "").strip() for column in columns)
    return next((cell for cell in cells if cell.lower() not in MISSING), "")


def _whole(cell: str) -> str:
    return cell.strip().removesuffix(".0")
