"""Where commands print, and what they write."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_hybrid.errors import PlanError

_WIDTH = 120


def terminal() -> Console:
    """The terminal; a file gets lines of one width, whatever the terminal's."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False, markup=False)


def short(number: float) -> str:
    """A number with four digits, and all of them before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def show_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    left: Sequence[str] = (),
) -> None:
    """Print a table; the columns named in `left` are text, all others numbers."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write(path: str, text: str, what: str) -> None:
    """Write a file, and say so.

    Raises:
        PlanError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path!r} cannot be written: {error.strerror}") from error
    print(f"{what} written to {path}")
