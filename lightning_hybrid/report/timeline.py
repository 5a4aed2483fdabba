"""Draw what each device does in a step as SVG; colours are classes of the page's style sheet."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
"""Width of the picture, in its own units; the page scales it."""
MARGIN = 120
"""Width left of the lanes, for names."""
CHARACTER = 6.6
"""Largest width of a character, in units."""


class Svg:
    """A picture in SVG, to which shapes are added.

    Args:
        height: height in units.
        title: description of the picture, for screen readers.
    """

    def __init__(self, height: float, title: str) -> None:
        self._parts = [
            f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" xmlns="http://www.w3.org/2000/svg">',
            f"<title>{escape(title)}</title>",
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, hint: str = ""
    ) -> None:
        """Add a filled rectangle; the hint is shown under the mouse pointer."""
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" '
            f'class="{kind}">{title}</rect>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Add a straight line."""
        self._parts.append(
            f'<line x1="{x:.2f}" y1="{y:.2f}" x2="{to_x:.2f}" y2="{to_y:.2f}" class="axis"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """Add a line of text, whose vertical middle is at y."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text x="{x:.2f}" y="{y + 4:.2f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def ticks(top: float) -> list[float]:
    """About six round numbers from 0 to `top`, for an axis."""
    power = 10.0 ** math.floor(math.log10(top / 5))
    step = max(power * digit for digit in (1, 2, 5) if 5 * power * digit <= top * (1 + 1e-9))
    return [step * number for number in range(int(top / step * (1 + 1e-9)) + 1)]


def scaled(top: float) -> tuple[float, str]:
    """The unit in which to show times up to `top` seconds: its factor and name."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if top * factor >= 1:
            return factor, name
    return 1e6, "us"


KINDS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight part of the backward",
    "reduce": "all-reduce",
    "step": "optimizer step",
}
"""Kinds of spans, which are colour classes too, and their names in the legend."""
_LANE, _LANES_TOP, _LANES_BOTTOM = 30, 34, 40


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


def draw_timeline(lanes: Mapping[str, Sequence[Span]], title: str) -> str:
    """Draw a timeline of a step, with a lane for each device.

    Args:
        lanes: By name of the device, its spans. All-reduces are drawn in the lower third of a lane,
            since they overlap computation.
        title: Description of the picture.
    """
    height = _LANES_TOP + _LANE * len(lanes) + _LANES_BOTTOM
    svg = Svg(height, title)
    end_s = max((span.end_s for spans in lanes.values() for span in spans), default=0.0) or 1.0
    unit = (WIDTH - MARGIN - 20) / end_s
    kinds = {span.kind for spans in lanes.values() for span in spans}
    _legend(svg, [kind for kind in KINDS if kind in kinds])
    for number, (name, spans) in enumerate(lanes.items()):
        top = _LANES_TOP + _LANE * number
        svg.text(MARGIN - 8, top + _LANE / 2, name, "end")
        svg.rect(MARGIN, top + 2, WIDTH - MARGIN - 20, _LANE - 4, "lane")
        # all-reduces last, since they are drawn over the computation that they overlap
        for span in sorted(spans, key=lambda span: span.kind == "reduce"):
            _draw(svg, span, top, unit)
    bottom = _LANES_TOP + _LANE * len(lanes)
    svg.line(MARGIN, bottom + 4, WIDTH - 20, bottom + 4)
    factor, name = scaled(end_s)
    for tick in ticks(end_s * factor):
        x = MARGIN + tick / factor * unit
        svg.line(x, bottom + 4, x, bottom + 9)
        svg.text(x, bottom + 18, f"{tick:g}", "middle")
    svg.text(WIDTH - 20, bottom + 33, f"time in {name}", "end", "quiet")
    return str(svg)


def _draw(svg: Svg, span: Span, top: float, unit: float) -> None:
    x, width = MARGIN + span.start_s * unit, (span.end_s - span.start_s) * unit
    if span.kind == "reduce":
        svg.rect(x, top + _LANE - 9, width, 7, span.kind, span.hint)
        return
    # a gap, so that neighbours of one colour stay apart
    gap = min(0.8, width / 4)
    svg.rect(x + gap / 2, top + 2, width - gap, _LANE - 4, span.kind, span.hint)
    if width > CHARACTER * len(span.label) + 3:
        svg.text(x + width / 2, top + _LANE / 2 - 1, span.label, "middle", "on")


def _legend(svg: Svg, kinds: Sequence[str]) -> None:
    x = float(MARGIN)
    for kind in kinds:
        svg.rect(x, 9, 14, 12, kind)
        svg.text(x + 20, 15, KINDS[kind])
        x += 50 + CHARACTER * len(KINDS[kind])
