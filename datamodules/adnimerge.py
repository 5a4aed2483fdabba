"""Diagnoses over time from ``ADNIMERGE_<date>.csv``: one row per subject and visit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from .errors import TableError
from .labels import diagnosis, known_words
from .progression import Visit
from .tables import date_format, parse_date, read_table

REQUIRED = ("ptid", "dx", "examdate")
_MISSING = ("", "na", "n/a", "nan", "-1", "-4")


def read_histories(path: Path) -> dict[str, list[Visit]]:
    """Known diagnoses by subject. Older tables' ``MCI to Dementia`` counts as the state after "to".

    Raises:
        TableError: see ``read_table``; also unknown diagnosis words and unreadable dates.
    """
    table = read_table(path, REQUIRED)
    written = date_format(table, "examdate")
    histories: dict[str, list[Visit]] = defaultdict(list)
    for row, line in zip(table.rows, table.lines):
        word = row.get("dx", "").lower().rpartition(" to ")[2]
        day = parse_date(row.get("examdate", ""), written)
        if word in _MISSING or day is None:
            continue
        dx = diagnosis(word)
        if dx is None:
            raise TableError(
                "UNKNOWN_LABEL",
                f"line {line}: diagnosis {row['dx']!r} is none of {known_words()}",
                str(path),
                "correct the table",
            )
        histories[row.get("ptid", "").upper()].append(Visit(day, dx))
    return dict(histories)
