"""Make HTML pages with paragraphs, tables and the picture of a step, for light and dark screens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
div.step { display: grid; grid-template-columns: max-content 1fr; gap: 4px 8px;
  font: 11px system-ui, sans-serif; }
div.lane { position: relative; height: 26px; background: #8882; }
div.lane i { position: absolute; top: 0; bottom: 0; box-sizing: border-box; overflow: hidden;
  border-right: 1px solid Canvas; font-style: normal; line-height: 26px; text-align: center; }
div.lane i.reduce { top: 19px; }
i { color: #10202f; } div.legend i { font-style: normal; padding: 2px 6px; margin-right: 1em; }
div.axis { display: flex; justify-content: space-between; border-top: 1px solid CanvasText; }
.forward { background: #8fc1f0; } .backward { background: #f3b36b; }
.weight { background: #f3d27a; } .reduce { background: #b79be0; }
.step i.step { background: #86c98a; }
"""
_LEFT = ' class="left"'


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Make an HTML page, as the text of one file.

    Args:
        title: title of the page, as plain text.
        sections: heading (plain text) and content (HTML) of each section; sections with an empty
            content are left out.
    """
    body = "".join(f"<h2>{escape(name)}</h2>\n{text}\n" for name, text in sections if text)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def paragraph(text: str) -> str:
    """Make an HTML paragraph, in grey, of plain text."""
    return f'<p class="quiet">{escape(text)}</p>\n'


def table(rows: Sequence[Mapping[str, str]], left: Iterable[str] = ()) -> str:
    """Make an HTML table; empty if there are no rows.

    Args:
        rows: for each row its cells, as plain text by name of the column. Each row has the same
            names in the same order; those of the first row are the head of the table.
        left: names of the columns that align left; the others align right.
    """
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


KINDS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight part of the backward",
    "reduce": "all-reduce",
    "step": "optimizer step",
}
"""By kind of `Span`, its name in the legend. Each kind is a CSS class too."""
_CHARACTER = 0.01
"""Share of the picture's width that a character takes at most: a label is left out if its bar is
too narrow for it."""
_NARROW = 0.004
"""Share of the picture's width below which a bar has no border."""
_MARKS = 5


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of time in which a device does one thing.

    Attributes:
        start_s: its start, in seconds from the start of the step.
        end_s: its end, in seconds from the start of the step.
        kind: a key of `KINDS`.
        label: text on it if there is room, such as the number of the micro-batch.
        hint: text that is shown under the mouse pointer.
    """

    start_s: float
    end_s: float
    kind: str
    label: str = ""
    hint: str = ""


def timeline(lanes: Mapping[str, Sequence[Span]]) -> str:
    """Draw the timeline of a step, with a lane for each device; returns HTML.

    The picture ends with the last span. All-reduces are drawn in the lower part of a lane, since
    they overlap computation.

    Args:
        lanes: by name of the device (plain text), what it does when; drawn in the order of the
            mapping.
    """
    spans = [span for lane in lanes.values() for span in lane]
    end_s = max((span.end_s for span in spans), default=0.0) or 1.0

    def bar(span: Span) -> str:
        left, share = span.start_s / end_s, (span.end_s - span.start_s) / end_s
        # (the border of a bar that is narrower would hide it)
        border = ";border:0" * (share < _NARROW)
        place = f"left:{left:.4%};width:{share:.4%}{border}"
        label = span.label if share > _CHARACTER * len(span.label) else ""
        hint = f' title="{escape(span.hint)}"' if span.hint else ""
        return f'<i class="{span.kind}" style="{place}"{hint}>{escape(label)}</i>'

    kinds = {span.kind for span in spans}
    legend = "".join(f'<i class="{k}">{name}</i>' for k, name in KINDS.items() if k in kinds)
    rows = [("", "legend", legend)]
    # all-reduces last, since they are drawn over the computation that they overlap
    for name, lane in lanes.items():
        ordered = sorted(lane, key=lambda span: span.kind == "reduce")
        rows.append((name, "lane", "".join(map(bar, ordered))))
    units = ((1, "s"), (1e3, "ms"), (1e6, "us"))
    factor, unit = next((each for each in units if end_s * each[0] >= 1), units[-1])
    marks = (f"{factor * end_s * k / (_MARKS - 1):.3g}" for k in range(_MARKS))
    rows.append((f"time in {unit}", "axis", "".join(f"<span>{mark}</span>" for mark in marks)))
    drawn = "".join(
        f'<div>{escape(name)}</div><div class="{kind}">{text}</div>\n' for name, kind, text in rows
    )
    return f'<div class="step" role="img" aria-label="one step">{drawn}</div>\n'
