import re
from xml.etree import ElementTree

import pytest

from lightning_hybrid.report import Span, draw_timeline, page, table
from lightning_hybrid.report.timeline import WIDTH, ticks

SPANS = {
    "device 1": [
        Span(start_s=0.0, end_s=1.0, kind="forward", label="0"),
        Span(start_s=2.0, end_s=4.0, kind="backward", label="0"),
        Span(start_s=2.0, end_s=5.0, kind="reduce"),
    ],
    "device 0 <driver>": [Span(start_s=1.0, end_s=2.0, kind="forward", label="0")],
}
PICTURE = draw_timeline(SPANS, "a & b")


def rectangles(text: str, kind: str) -> list[tuple[float, float]]:
    """Left end and width of the rectangles of a class."""
    found = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)".*?class="(\w+)"', text)
    return [(float(x), float(width)) for x, width, one in found if one == kind]


def test_a_picture_is_well_formed_and_inside_its_frame() -> None:
    root = ElementTree.fromstring(PICTURE)
    height = float(root.attrib["viewBox"].split()[3])
    for shape in root.iter():
        x, y = (float(shape.get(a, 0)) for a in ("x", "y"))
        assert 0 <= x + float(shape.get("width", 0)) <= WIDTH + 0.01
        assert 0 <= y + float(shape.get("height", 0)) <= height + 0.01


def test_lengths_are_in_proportion_to_times() -> None:
    (_, forward), (_, second) = rectangles(PICTURE, "forward")[1:]  # after the legend
    _, backward = rectangles(PICTURE, "backward")[1]
    assert forward == pytest.approx(second, abs=0.02)
    assert backward / forward == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("top", "expected"), [(10.0, [0, 2, 4, 6, 8, 10]), (0.9, [0, 0.1]), (1.0, [0, 0.2])]
)
def test_ticks_are_round(top: float, expected: list[float]) -> None:
    found = ticks(top)
    assert found[: len(expected)] == pytest.approx(expected)
    assert len(found) <= 12


def test_a_page_needs_nothing_from_elsewhere_and_knows_dark_screens() -> None:
    text = page("<title>", [("Pictures", PICTURE), ("Empty", "")])
    assert "&lt;title&gt;" in text
    assert "Empty" not in text
    assert "color-scheme: light dark" in text
    links = re.findall(r'(?:src|href)="[^"]*"|url\([^)]*\)|https?://[^"]+', text)
    assert set(links) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    classes = set(re.findall(r'class="([\w ]+)"', text))
    for name in " ".join(classes).split():
        assert f".{name}" in text or f"{name} " in text


def test_a_table_escapes_its_cells() -> None:
    assert "a&lt;b" in table([{"name": "a<b", "value": "1"}], left=["name"])
