"""The few shapes that pictures are made of. Colours are classes of the page's style sheet."""

from collections.abc import Sequence
from html import escape

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
    if len(text) <= room:
        return text
    return f"{text[: room - 1]}…" if room > 3 else ""


def ticks(top: float, count: int = 6) -> list[float]:
    """Round numbers from 0 to `top`, about so many."""
    if top <= 0:
        return [0.0]
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
