import re
from xml.etree import ElementTree

from lightning_hybrid.report import Span, page, table, timeline

SPANS = {
    "device 1": [
        Span(start_s=0.0, end_s=1.0, kind="forward", label="0"),
        Span(start_s=2.0, end_s=4.0, kind="backward", label="0"),
        Span(start_s=2.0, end_s=5.0, kind="reduce"),
    ],
    "device 0 <driver>": [Span(start_s=1.0, end_s=2.0, kind="forward", label="0")],
}
PICTURE = timeline(SPANS)


def bars(text: str, kind: str) -> list[tuple[float, float]]:
    """Left end and width of the bars of a kind, in percent."""
    found = re.findall(rf'class="{kind}" style="left:([\d.]+)%;width:([\d.]+)%"', text)
    return [(float(left), float(width)) for left, width in found]


def test_bars_are_where_their_times_are() -> None:
    assert bars(PICTURE, "forward") == [(0, 20), (20, 20)]
    assert bars(PICTURE, "backward") == [(40, 40)]
    assert bars(PICTURE, "reduce") == [(40, 60)]
    # the last one is drawn over what it overlaps
    assert PICTURE.index("left:40.0000%;width:60") > PICTURE.index("left:40.0000%;width:40")


def test_a_picture_is_well_formed_and_names_what_is_in_it() -> None:
    root = ElementTree.fromstring(PICTURE)
    texts = [element.text for element in root.iter()]
    assert {"device 0 <driver>", "forward", "backward", "all-reduce", "time in s"} <= {*texts}
    assert "optimizer step" not in texts
    assert [float(e.text or "") for e in root.iter("span")] == [0, 1.25, 2.5, 3.75, 5]


def test_bars_that_are_narrower_than_their_border_have_none() -> None:
    spans = [Span(start_s=0.0, end_s=1.0, kind="forward")]
    spans += [Span(start_s=999.0, end_s=1000.0, kind="backward")]
    assert timeline({"device 0": spans}).count("border:0") == 2
    assert "border:0" not in PICTURE


def test_a_label_without_room_is_left_out() -> None:
    def labels(count: int) -> list[str]:
        spans = [
            Span(start_s=k * 1e-4, end_s=(k + 1) * 1e-4, kind="step", label=f"{k:03}")
            for k in range(count)
        ]
        return re.findall(r">(\d{3})</i>", timeline({"device 0": spans}))

    assert labels(10) == [f"{k:03}" for k in range(10)]
    assert labels(100) == []


def test_a_page_needs_nothing_from_elsewhere_and_knows_dark_screens() -> None:
    text = page("<title>", [("Pictures", PICTURE), ("Empty", "")])
    assert "&lt;title&gt;" in text
    assert "Empty" not in text
    assert "color-scheme: light dark" in text
    links = re.findall(r'(?:src|href)="[^"]*"|url\([^)]*\)|https?://[^"]+', text)
    assert links == []
    classes = set(re.findall(r'class="([\w ]+)"', text))
    for name in " ".join(classes).split():
        assert f".{name}" in text or f"{name} " in text


def test_a_table_escapes_its_cells() -> None:
    assert "a&lt;b" in table([{"name": "a<b", "value": "1"}], left=["name"])
