"""Make HTML pages with paragraphs and tables, for light and dark screens."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

# part of the page, which must open without other files and without a network
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; color: CanvasText; background: Canvas;
  max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
div.wide { overflow-x: auto; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8886; }
th.left, td.left { text-align: left; }
td:not(.left) { white-space: nowrap; }
p.quiet { color: GrayText; max-width: 52rem; margin: .3rem 0; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; display: block; }
svg text { fill: CanvasText; } svg text.quiet { fill: GrayText; } svg text.on { fill: #10202f; }
.lane { fill: #8882; } .forward { fill: #8fc1f0; } .backward { fill: #f3b36b; }
.weight { fill: #f3d27a; } .reduce { fill: #9a6bd1; } .step { fill: #86c98a; }
.axis { stroke: CanvasText; }
"""


_LEFT = ' class="left"'


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Make a page of sections: heading, and content in HTML. Those without content are left out."""
    body = "".join(f"<h2>{escape(name)}</h2>\n{text}\n" for name, text in sections if text)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def paragraph(text: str) -> str:
    """Make a paragraph of explanation, in HTML, of plain text."""
    return f'<p class="quiet">{escape(text)}</p>\n'


def table(rows: Sequence[Mapping[str, str]], left: Iterable[str] = ()) -> str:
    """Make a table in HTML; the keys of the first row are its head, `left` columns align left."""
    if not rows:
        return ""
    names = set(left)

    def line(tag: str, cells: Mapping[str, str]) -> str:
        return "".join(
            f"<{tag}{_LEFT if name in names else ''}>{escape(cell)}</{tag}>"
            for name, cell in cells.items()
        )

    head = line("th", {name: name for name in rows[0]})
    body = "".join(f"<tr>{line('td', row)}</tr>\n" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>\n'
