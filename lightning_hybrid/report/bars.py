"""Horizontal bars, one below the other, with a limit where there is one."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.report.svg import MARGIN, WIDTH, Svg

_BAR, _TOP = 26, 8
_AFTER = 150
"""Room right of the bars, for their values."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A value, in parts that are stacked.

    Attributes:
        name: written left of it.
        parts: class of the colour and value of each.
        text: the value, in words.
        limit: where a line crosses it, in the unit of the parts; None: no line.
    """

    name: str
    parts: Sequence[tuple[str, float]]
    text: str
    limit: float | None = None


def draw_bars(bars: Sequence[Bar], title: str) -> str:
    """Draw bars of one unit."""
    svg = Svg(_TOP + _BAR * len(bars) + 8, title)
    values = [sum(value for _, value in bar.parts) for bar in bars]
    top = max([*values, *(bar.limit or 0.0 for bar in bars)]) or 1.0
    unit = (WIDTH - MARGIN - _AFTER) / top
    for number, (bar, value) in enumerate(zip(bars, values)):
        y = _TOP + _BAR * number
        svg.text(MARGIN - 8, y + _BAR / 2, bar.name, "end")
        x = float(MARGIN)
        for kind, part in bar.parts:
            svg.rect(x, y + 3, part * unit, _BAR - 6, kind)
            x += part * unit
        if bar.limit is not None:
            at = MARGIN + bar.limit * unit
            svg.line(at, y + 1, at, y + _BAR - 1, "limit")
        svg.text(MARGIN + max(value, bar.limit or 0.0) * unit + 8, y + _BAR / 2, bar.text)
    return str(svg)
