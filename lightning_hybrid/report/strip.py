"""The network as a strip: its partitions in order, as wide as their load, with the cuts."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybrid.report.svg import WIDTH, Svg, shortened

_TOP, _HEIGHT = 26, 54


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
    svg = Svg(_TOP + _HEIGHT + 44, title)
    total = sum(piece.load for piece in pieces) or 1.0
    unit = (WIDTH - 24) / total
    x = 12.0
    for number, piece in enumerate(pieces):
        width = piece.load * unit
        svg.text(x + width / 2, 14, shortened(piece.name, width), "middle")
        left = x
        for name, load in piece.partitions:
            hint = f"{name}: {load / total:.1%} of the load"
            svg.rect(left + 0.5, _TOP, load * unit - 1, _HEIGHT, f"c{piece.device % 8}", hint)
            left += load * unit
        first = piece.partitions[0][0] if piece.partitions else ""
        svg.text(x + 4, _TOP + _HEIGHT / 2, shortened(first, width - 8), "start", "on")
        x += width
        if piece.cut:
            svg.line(x, _TOP - 8, x, _TOP + _HEIGHT + 8, "cut")
            # neighbouring texts on two lines, so that they do not meet
            below = _TOP + _HEIGHT + (16 if number % 2 == 0 else 32)
            anchor = "end" if x > WIDTH - 60 else "start" if x < 60 else "middle"
            svg.text(x, below, piece.cut, anchor, "quiet")
    return str(svg)
