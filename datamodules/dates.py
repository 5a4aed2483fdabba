"""Dates as tables write them.

A column is read in one way that fits all its cells, with the time of day left out. Where two ways
fit and give other days, the portal's own (month/day/year) is taken and said; for spellings that the
portal never uses the question goes back to the user.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path

from .errors import TableError
from .tables import MISSING, Table

Cell = tuple[Path, int, str]
"""Table, line and text."""

_PORTAL = "%m/%d/%Y"
_WAYS = {
    "%Y-%m-%d": "year-month-day",
    _PORTAL: "month/day/year",
    "%d/%m/%Y": "day/month/year",
    "%d.%m.%Y": "day.month.year",
    "%d-%b-%Y": "day-month-year",
    "%d-%b-%y": "day-month-year",
    "%d %b %Y": "day month year",
    "%Y/%m/%d": "year/month/day",
    "%Y%m%d": "year, month, day",
    "%d-%m-%Y": "day-month-year",
    "%m-%d-%Y": "month-day-year",
    "%d.%m.%y": "day.month.year",
    "%m/%d/%y": "month/day/year",
    "%d/%m/%y": "day/month/year",
}
_TIME = re.compile(r"[ T]+\d{1,2}:\d\d(:\d\d(\.\d+)?)?\s*([AP]M)?Z?$", re.IGNORECASE)


@dataclass(frozen=True)
class Dates:
    """The way in which a column writes its days.

    Attributes:
        written: format of ``strptime``; empty: the column has no dates.
        note: what was decided and not found, for the user; empty: nothing.
    """

    written: str = ""
    note: str = ""

    def day(self, text: str) -> date | None:
        """The day in a cell of that column; None for an empty one."""
        return None if text.lower() in MISSING else _parse(_day_part(text), self.written)


def dates_in(table: Table, column: str) -> Dates:
    """How a column of a table writes its days; see `find_dates`."""
    return find_dates(
        ((table.path, line, row.get(column, "")) for line, row in zip(table.lines, table.rows)),
        column,
    )


def find_dates(cells: Iterable[Cell], column: str) -> Dates:
    """How a column writes its days, which may stand in several files of one kind.

    Raises:
        TableError: no single way reads all cells, or two do and differ.
    """
    filled = [
        (path, line, _day_part(text)) for path, line, text in cells if text.lower() not in MISSING
    ]
    if not filled:
        return Dates()
    fitting = [way for way in _WAYS if all(_parse(text, way) for _, _, text in filled)]
    if not fitting:
        raise _unreadable(filled, column)
    for cell in filled:
        days = {way: _parse(cell[2], way) for way in fitting}
        if len(set(days.values())) > 1:
            return _decide(cell, column, fitting)
    note = ""
    if fitting[0].endswith("%y"):
        path, _, text = filled[0]
        note = f"{path.name}: {column} {text!r} read as {_parse(text, fitting[0])}"
    return Dates(fitting[0], note)


def _decide(cell: Cell, column: str, fitting: Collection[str]) -> Dates:
    path, line, text = cell
    if _PORTAL in fitting:
        note = (
            f"{path.name}: {column} could be {' or '.join(_WAYS[way] for way in fitting)}; read as "
            f"{_WAYS[_PORTAL]}, the portal's way: {text!r} is {_parse(text, _PORTAL)}"
        )
        return Dates(_PORTAL, note)
    days = " or ".join(str(_parse(text, way)) for way in fitting)
    raise TableError(
        "BAD_DATE",
        f"line {line}: {column} {text!r} could be {days}",
        str(path),
        "write the dates of this column as YYYY-MM-DD",
    )


def _unreadable(filled: Collection[Cell], column: str) -> TableError:
    """Names the first cell that differs from most others."""
    usual = max(_WAYS, key=lambda way: sum(_parse(text, way) is not None for _, _, text in filled))
    path, line, text = next(cell for cell in filled if _parse(cell[2], usual) is None)
    serial = re.fullmatch(r"\d{5}(\.\d+)?", text)
    if serial:
        day = date(1899, 12, 30) + timedelta(days=float(text))
        return TableError(
            "BAD_DATE",
            f"line {line}: {column} {text!r} is a spreadsheet's number of a day, {day} unless it "
            "counts from 1904",
            str(path),
            "give the column the format of a date, YYYY-MM-DD, and export the table again",
        )
    others = f"; others are {_WAYS[usual]}" if any(_parse(t, usual) for _, _, t in filled) else ""
    return TableError(
        "BAD_DATE",
        f"line {line}: {column} {text!r}{others}",
        str(path),
        "write all dates of this column in one way, best as YYYY-MM-DD",
    )


def _day_part(text: str) -> str:
    return _TIME.sub("", text.strip())


def _parse(text: str, written: str) -> date | None:
    try:
        return datetime.strptime(text, written).date()
    except ValueError:
        return None
