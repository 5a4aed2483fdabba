"""A page that opens without network: text, tables, and pictures inside the file."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin-bottom: .2rem; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
td.text { overflow-wrap: anywhere; min-width: 6rem; max-width: 24rem; }
div.wide { overflow-x: auto; }
img { max-width: 100%; margin: .3rem .3rem .3rem 0; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 13px; }
.flow .row { display: flex; align-items: center; gap: .6rem; }
.flow .box { border: 1px solid #888; border-radius: 4px; padding: .4rem .8rem; width: max-content; }
.flow .out { border-style: dashed; color: #555; }
.flow .arrow { padding-left: 2rem; }
.flow .row .arrow { padding-left: 0; }
.note { color: #555; max-width: 50rem; }
"""

_TEXT = ' class="text"'
_LONG = 26  # characters: longer than any number with its interval


def page(title: str, parts: Iterable[tuple[str, str]]) -> str:
    """A whole page from (heading, content) pairs; those without content are left out."""
    body = "".join(f"<h2>{escape(name)}</h2>\n{text}\n" for name, text in parts if text)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def note(text: str) -> str:
    """A paragraph of explanation."""
    return f'<p class="note">{escape(text)}</p>\n'


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with the keys of the first row as its head; numbers to three digits.

    ``x_low`` and ``x_high`` stand in the column of ``x``, as its interval.
    """
    if not rows:
        return ""
    shown = [{k: _shown(v) for k, v in _with_intervals(row).items()} for row in rows]
    words = {k for row in shown for k, text in row.items() if len(text) > _LONG}

    def cells(row: Mapping[str, str], kind: str) -> str:
        return "".join(
            f"<{kind}{_TEXT if k in words else ''}>{escape(text)}</{kind}>"
            for k, text in row.items()
        )

    head = cells({name: str(name).replace("_", " ") for name in shown[0]}, "th")
    body = "".join(f"<tr>{cells(row, 'td')}</tr>\n" for row in shown)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>\n'


def _with_intervals(row: Mapping[str, object]) -> dict[str, object]:
    left = dict(row)
    for name in row:
        if f"{name}_low" in row and f"{name}_high" in row:
            ends = [_shown(left.pop(f"{name}_{end}")) for end in ("low", "high")]
            if all(ends):
                left[name] = f"{_shown(row[name])} ({ends[0]} to {ends[1]})"
    return left


def pre(text: str) -> str:
    """Text as it is."""
    return f"<pre>{escape(text)}</pre>\n"


def figure(drawn: Figure) -> str:
    """A figure as a picture in the page."""
    file = io.BytesIO()
    drawn.savefig(file, format="png", dpi=100)
    return _picture(file.getvalue(), "figure")


def picture(path: Path) -> str:
    """A PNG file as a picture in the page; nothing if it is gone."""
    return _picture(path.read_bytes(), path.stem) if path.is_file() else ""


def _picture(data: bytes, text: str) -> str:
    coded = base64.b64encode(data).decode()
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{coded}">\n'


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    try:
        return f"{float(text):.3f}" if "." in text else text
    except ValueError:
        return text
