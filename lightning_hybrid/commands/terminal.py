"""Where commands print."""

from rich.console import Console

_WIDTH = 120


def terminal() -> Console:
    """The terminal; a file gets lines of one width, whatever the terminal's."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=_WIDTH, highlight=False, markup=False)


def short(number: float) -> str:
    """A number with four digits, and all of them before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
