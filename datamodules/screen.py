"""What the commands print: coloured and in tables on a terminal, plain and in full elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from .report import Group, p_text

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


def show_groups(groups: Sequence[Group], p: Mapping[str, float]) -> None:
    """Print the demographic table, a column for each class, and what the classes differ in.

    Args:
        groups: the classes, and all together.
        p: p-values by column of the table.
    """
    if not groups:
        return
    names = [group.diagnosis for group in groups]
    table = Table("", *names, *(["p"] if p else []), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in _ROWS.items():
        cells = [str(getattr(group, name)) for group in groups]
        if set(cells) != {"-"}:
            table.add_row(title, *cells, *([p_text(p.get(name))] if p else []))
    _console().print(table)
    for name in _CONFOUNDS:
        if p.get(name, 1) < _DIFFERENT:
            show(
                f"note: the classes differ in {_ROWS[name]} (p {p_text(p[name])}): a network may "
                "learn that instead of the disease"
            )


_ROWS = {
    "subjects": "subjects",
    "scans": "scans",
    "males_females": "M/F",
    "age": "age",
    "mmse": "MMSE",
    "cdr_sb": "CDR-SB",
    "apoe4": "APOE4 carriers",
    "field_strength": "field strength",
    "phase": "phase",
    "sites": "site",
    "scanners": "scanner",
    "cohorts": "cohort",
    "voxel_mm": "voxel (mm)",
}
_CONFOUNDS = ("males_females", "age", *list(_ROWS)[list(_ROWS).index("field_strength") :])
_DIFFERENT = 0.01
