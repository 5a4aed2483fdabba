"""What each device does in a step: one lane per device, time from left to right."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hybrid.report.svg import CHARACTER, MARGIN, WIDTH, Svg, scaled, ticks

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "weight part of the backward",
    "reduce": "all-reduce",
    "step": "optimizer step",
}
"""Classes of spans, and what the legend calls them."""
_LANE, _TOP, _BOTTOM = 30, 34, 40


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
    height = _TOP + _LANE * len(lanes) + _BOTTOM
    svg = Svg(height, title)
    last_s = max((span.end_s for spans in lanes.values() for span in spans), default=0.0)
    end_s = max(end_s or 0.0, last_s) or 1.0
    unit = (WIDTH - MARGIN - 20) / end_s
    kinds = {span.kind for spans in lanes.values() for span in spans}
    _legend(svg, [kind for kind in KINDS if kind in kinds])
    for number, (name, spans) in enumerate(lanes.items()):
        top = _TOP + _LANE * number
        svg.text(MARGIN - 8, top + _LANE / 2, name, "end")
        svg.rect(MARGIN, top + 2, WIDTH - MARGIN - 20, _LANE - 4, "lane")
        # all-reduces last, since they lie over the computation beside which they run
        for span in sorted(spans, key=lambda span: span.kind == "reduce"):
            _draw(svg, span, top, unit)
    bottom = _TOP + _LANE * len(lanes)
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
