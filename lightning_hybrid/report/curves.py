"""Curves over the number of devices."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from lightning_hybrid.report.svg import CHARACTER, MARGIN, WIDTH, Svg, ticks

_TOP, _HEIGHT = 34, 260


def draw_curves(
    numbers: Sequence[int], curves: Mapping[str, Sequence[float | None]], title: str
) -> str:
    """Draw speed-ups; equal distances for the numbers, and a thin line for the ideal.

    Args:
        numbers: of devices, rising.
        curves: For each number a value or None, by the name of the curve.
        title: What it shows.
    """
    svg = Svg(_TOP + _HEIGHT + 46, title)
    known = [value for values in curves.values() for value in values if value is not None]
    # the ideal is shown as far as it does not press the curves down
    top = max([1.0, *known]) * 1.1
    width = WIDTH - MARGIN - 40
    across = [MARGIN + width * k / max(1, len(numbers) - 1) for k in range(len(numbers))]

    def height(value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / top)

    for tick in ticks(top):
        svg.line(MARGIN, height(tick), MARGIN + width, height(tick), "grid")
        svg.text(MARGIN - 8, height(tick), f"{tick:g}", "end")
    for x, number in zip(across, numbers):
        svg.line(x, _TOP + _HEIGHT, x, _TOP + _HEIGHT + 5)
        svg.text(x, _TOP + _HEIGHT + 16, str(number), "middle")
    svg.line(MARGIN, _TOP + _HEIGHT, MARGIN + width, _TOP + _HEIGHT)
    svg.text(MARGIN + width, _TOP + _HEIGHT + 34, "devices", "end", "quiet")
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
