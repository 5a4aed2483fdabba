"""The pictures of a page: bars, curves, a timeline, the network as a strip; and their shapes.

Colours are classes of the page's style sheet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 960
"""Of every picture, in its own units; the page scales it."""
MARGIN = 120
"""Left of the axes, for names."""
CHARACTER = 6.6
"""Width of a character of 11 units height, at most."""


class Svg:
    """A picture to which shapes are added.

    Args:
        height: in units.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, height: float, title: str) -> None:
        self._parts = [
            f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" xmlns="http://www.w3.org/2000/svg">',
            f"<title>{escape(title)}</title>",
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, hint: str = ""
    ) -> None:
        """A filled rectangle; the hint shows under the pointer."""
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{height:.2f}" '
            f'class="{kind}">{title}</rect>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "axis") -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{x:.2f}" y1="{y:.2f}" x2="{to_x:.2f}" y2="{to_y:.2f}" class="{kind}"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str, width: float) -> None:
        """Lines from point to point, with a mark on each."""
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{text}" class="curve {kind}" stroke-width="{width:g}"/>'
        )
        for x, y in points:
            self._parts.append(
                f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{width + 1:g}" class="{kind}"/>'
            )

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """A line of text, whose middle is at height y."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text x="{x:.2f}" y="{y + 4:.2f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def shortened(text: str, width: float) -> str:
    """The text, or its beginning and an ellipsis, as far as it goes into a width; or nothing."""
    room = int(width / CHARACTER)
    # SVG neither wraps nor cuts text
    if len(text) <= room:
        return text
    return f"{text[: room - 1]}…" if room > 3 else ""


def ticks(top: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to `top`, about so many."""
    if top <= 0:
        return [0.0]
    # steps of 1, 2 or 5 times a power of ten are read at a glance
    step = 10.0 ** len(str(int(top))) if top >= 1 else 1.0
    while True:
        for divisor in (1, 2, 5, 10):
            if top / (step / divisor) >= count - 1:
                step /= divisor
                return [step * number for number in range(int(top / step * (1 + 1e-9)) + 1)]
        step /= 10


def scaled(top: float) -> tuple[float, str]:
    """The unit of time to show values up to `top` seconds in: factor and name."""
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if top * factor >= 1:
            return factor, name
    return 1e6, "us"


# ---------------------------------------------------------------- bars

_BAR, _BARS_TOP = 26, 8
_BARS_AFTER = 150
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
    svg = Svg(_BARS_TOP + _BAR * len(bars) + 8, title)
    values = [sum(value for _, value in bar.parts) for bar in bars]
    # the limit is part of the scale, or its line would lie outside
    top = max([*values, *(bar.limit or 0.0 for bar in bars)]) or 1.0
    unit = (WIDTH - MARGIN - _BARS_AFTER) / top
    for number, (bar, value) in enumerate(zip(bars, values)):
        y = _BARS_TOP + _BAR * number
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


# ---------------------------------------------------------------- curves over the number of devices

_CURVES_TOP, _CURVES_HEIGHT = 34, 260


def draw_curves(
    numbers: Sequence[int], curves: Mapping[str, Sequence[float | None]], title: str
) -> str:
    """Draw speed-ups; equal distances for the numbers, and a thin line for the ideal.

    Args:
        numbers: of devices, rising.
        curves: For each number a value or None, by the name of the curve.
        title: What it shows.
    """
    svg = Svg(_CURVES_TOP + _CURVES_HEIGHT + 46, title)
    known = [value for values in curves.values() for value in values if value is not None]
    # the ideal is shown as far as it does not press the curves down
    top = max([1.0, *known]) * 1.1
    width = WIDTH - MARGIN - 40
    across = [MARGIN + width * k / max(1, len(numbers) - 1) for k in range(len(numbers))]

    def height(value: float) -> float:
        return _CURVES_TOP + _CURVES_HEIGHT * (1 - value / top)

    for tick in ticks(top):
        svg.line(MARGIN, height(tick), MARGIN + width, height(tick), "grid")
        svg.text(MARGIN - 8, height(tick), f"{tick:g}", "end")
    for x, number in zip(across, numbers):
        svg.line(x, _CURVES_TOP + _CURVES_HEIGHT, x, _CURVES_TOP + _CURVES_HEIGHT + 5)
        svg.text(x, _CURVES_TOP + _CURVES_HEIGHT + 16, str(number), "middle")
    svg.line(MARGIN, _CURVES_TOP + _CURVES_HEIGHT, MARGIN + width, _CURVES_TOP + _CURVES_HEIGHT)
    svg.text(MARGIN + width, _CURVES_TOP + _CURVES_HEIGHT + 34, "devices", "end", "quiet")
    ideal = [(x, number) for x, number in zip(across, numbers) if number <= top]
    for (x, one), (to_x, other) in pairwise(ideal):
        svg.line(x, height(one), to_x, height(other), "ideal")
    # the last one widest and first, so that those that lie on it are seen as well
    for index, values in reversed([*enumerate(curves.values())]):
        points = [(x, height(v)) for x, v in zip(across, values) if v is not None]
        svg.path(points, f"c{index}", 2 + 2 * index)
    left = float(MARGIN)
    for index, name in enumerate(curves):
        svg.rect(left, 9, 14, 12, f"c{index}")
        svg.text(left + 20, 15, name)
        left += 50 + CHARACTER * len(name)
    svg.line(left, 15, left + 16, 15, "ideal")
    svg.text(left + 22, 15, "one device times their number")
    return str(svg)


# ---------------------------------------------------------------- the network as a strip

_STRIP_TOP, _STRIP_HEIGHT = 26, 54


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stage, or what a stage has.

    Attributes:
        name: written above it, such as `stage 0`.
        load: its width, as a share of the sum over all pieces.
        device: number of its device, which gives the colour.
        partitions: name and load of each, in order.
        cut: what crosses the cut after it; empty for the last one.
    """

    name: str
    load: float
    device: int
    partitions: Sequence[tuple[str, float]]
    cut: str


def draw_strip(pieces: Sequence[Piece], title: str) -> str:
    """Draw a network and where it is cut."""
    svg = Svg(_STRIP_TOP + _STRIP_HEIGHT + 44, title)
    # a network without counted load is drawn too, without width
    total = sum(piece.load for piece in pieces) or 1.0
    unit = (WIDTH - 24) / total
    x = 12.0
    for number, piece in enumerate(pieces):
        width = piece.load * unit
        svg.text(x + width / 2, 14, shortened(piece.name, width), "middle")
        left = x
        for name, load in piece.partitions:
            hint = f"{name}: {load / total:.1%} of the load"
            svg.rect(
                left + 0.5, _STRIP_TOP, load * unit - 1, _STRIP_HEIGHT, f"c{piece.device % 8}", hint
            )
            left += load * unit
        first = piece.partitions[0][0] if piece.partitions else ""
        svg.text(x + 4, _STRIP_TOP + _STRIP_HEIGHT / 2, shortened(first, width - 8), "start", "on")
        x += width
        if piece.cut:
            svg.line(x, _STRIP_TOP - 8, x, _STRIP_TOP + _STRIP_HEIGHT + 8, "cut")
            # neighbouring texts on two lines, so that they do not meet
            below = _STRIP_TOP + _STRIP_HEIGHT + (16 if number % 2 == 0 else 32)
            anchor = "end" if x > WIDTH - 60 else "start" if x < 60 else "middle"
            svg.text(x, below, piece.cut, anchor, "quiet")
    return str(svg)


# ---------------------------------------------------------------- what each device does in a step

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight part of the backward",
    "reduce": "all-reduce",
    "step": "optimizer step",
}
"""Classes of spans, and what the legend calls them."""
_LANE, _LANES_TOP, _LANES_BOTTOM = 30, 34, 40


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a device does.

    Attributes:
        start_s: seconds from the start of the step.
        end_s: likewise, when it is over.
        kind: a key of `KINDS`.
        label: written on it where there is room: the micro-batch.
        hint: what it is, in words.
    """

    start_s: float
    end_s: float
    kind: str
    label: str = ""
    hint: str = ""


def draw_timeline(
    lanes: Mapping[str, Sequence[Span]], title: str, end_s: float | None = None
) -> str:
    """Draw a step.

    Args:
        lanes: What each device does, by its name. All-reduces have the lower third of a lane, since
            they run beside computation.
        title: What it shows.
        end_s: End of the axis; None: that of the last span. Two pictures of one scale can be
            compared.
    """
    height = _LANES_TOP + _LANE * len(lanes) + _LANES_BOTTOM
    svg = Svg(height, title)
    last_s = max((span.end_s for spans in lanes.values() for span in spans), default=0.0)
    end_s = max(end_s or 0.0, last_s) or 1.0
    unit = (WIDTH - MARGIN - 20) / end_s
    kinds = {span.kind for spans in lanes.values() for span in spans}
    _legend(svg, [kind for kind in KINDS if kind in kinds])
    for number, (name, spans) in enumerate(lanes.items()):
        top = _LANES_TOP + _LANE * number
        svg.text(MARGIN - 8, top + _LANE / 2, name, "end")
        svg.rect(MARGIN, top + 2, WIDTH - MARGIN - 20, _LANE - 4, "lane")
        # all-reduces last, since they lie over the computation beside which they run
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
    # neighbours of one colour would run together
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
