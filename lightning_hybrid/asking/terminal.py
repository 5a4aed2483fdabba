"""Print tables to the terminal and write files, for the commands."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_hybrid.errors import PlanError

_WIDTH = 120


def terminal() -> Console:
    """Make the console for standard output; if that is no terminal, lines have a fixed width."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False, markup=False)


def short(number: float) -> str:
    """Format a number with four significant digits, or as a whole number from 1000 on."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    left: Sequence[str] = (),
) -> None:
    """Print a table.

    Args:
        console: where to print.
        title: text above the table.
        columns: names of the columns.
        rows: for each row the text of its cells, in the order of the columns.
        left: names of the columns that are aligned left; all others are aligned right.
    """
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write(path: str, text: str, what: str) -> None:
    """Write a text to a file, in place of one that is there, and print that it was written.

    Args:
        path: path of the file.
        text: the text.
        what: what the text is, for the message, such as `plan`.

    Raises:
        PlanError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path!r} cannot be written: {error.strerror}") from error
    print(f"{what} written to {path}")
