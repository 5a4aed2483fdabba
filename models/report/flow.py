"""Who was left out, and why, as a chart of boxes."""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from models.report import html


def flow_chart(run: Path) -> str:
    """The chart of a run's ``flow.json``; nothing without that."""
    path = run / "flow.json"
    if not path.is_file():
        return ""
    counts: dict[str, Any] = json.loads(path.read_text())
    later = counts["later_scans_of_held_out_people"]
    steps = [
        _step("found", counts["found"], "excluded", counts["excluded"]),
        _step("wanted", _rest(counts["found"], counts["excluded"]), "bad", counts["bad"]),
        _box("used", counts["used"]),
    ]
    parts = "".join(_part(name, own) for name, own in counts["parts"].items())
    text = '<div class="arrow">&darr;</div>\n'.join(steps)
    text += f'<div class="arrow">&darr;</div>\n<div class="row">{parts}</div>\n'
    note = f"{later} later scans of held-out people are not evaluated. " if later else ""
    note += "The reasons are explained in docs/adni.md; the manifest has that of each scan."
    return f'<div class="flow">{text}</div>\n' + html.note(note)


def _rest(found: Mapping[str, Any], gone: Mapping[str, Any]) -> dict[str, Any]:
    """Scans alone: people may have some of either kind."""
    return {"scans": found["scans"] - gone["scans"]}


def _step(name: str, size: Mapping[str, Any], out: str, gone: Mapping[str, Any]) -> str:
    """A box, and beside it those that leave."""
    if not gone["scans"]:
        return _box(name, size)
    why = "".join(
        f"<br>{count} {escape(reason.replace('_', ' '))}" for reason, count in gone["why"].items()
    )
    beside = f'<div class="box out">{_sized(out, gone)}{why}</div>'
    return f'<div class="row">{_box(name, size)}<div class="arrow">&rarr;</div>{beside}</div>\n'


def _box(name: str, size: Mapping[str, Any]) -> str:
    return f'<div class="box">{_sized(name, size)}</div>\n'


def _part(name: str, own: Mapping[str, Any]) -> str:
    classes = ", ".join(f"{count} {escape(label)}" for label, count in own["classes"].items())
    below = f"<br>{classes}" if classes else ""
    return f'<div class="box">{_sized(name, own)}{below}</div>'


def _sized(name: str, size: Mapping[str, Any]) -> str:
    people = f" of {size['people']} people" if "people" in size else ""
    return f"<b>{escape(name)}</b>: {size['scans']} scans{people}"
