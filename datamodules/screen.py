"""What the commands print: coloured and in tables on a terminal, plain and in full elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .report import Group

_WIDE = 10_000  # where nobody looks, a line is as long as its names
_STYLES = {"warning:": "yellow", "note:": "yellow", "bad:": "bold red", "found": "bold"}


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    return console if console.is_terminal else Console(width=_WIDE, highlight=False, markup=False)


def show(text: str) -> None:
    """Print lines, those that count in colour."""
    console = _console()
    for line in text.splitlines():
        console.print(line, style=_STYLES.get(line.partition(" ")[0]))


def show_groups(groups: Sequence[Group]) -> None:
    """Print the demographic table."""
    if not groups:
        return
    table = Table("", "subjects", "scans", "M/F", "age", "MMSE", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in groups:
        table.add_row(
            row.diagnosis, str(row.subjects), str(row.scans), row.males_females, row.age, row.mmse
        )
    _console().print(table)
