"""The parts of a report about scans that are not the run's: other cohorts, and new scans."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from models.drawing import NUMBER_FIGURES
from models.reference import FEW
from models.report import html
from models.results import load_settings
from models.tables import read_table


def external(run: Path) -> str:
    """Each external cohort: metrics beside the internal ones, calibration, groups and shift."""
    text = ""
    for folder in sorted((run / "external").glob("*")):
        path = folder / "external_metrics.json"
        if not path.is_file():
            continue
        text += f"<h3>{escape(folder.name)}</h3>\n" + html.note(
            "All people of another cohort: none was trained on, and nothing was chosen on them."
        )
        of = (load_settings(path) or {}).get("threshold_of", FEW)
        for name, title in _EXTERNAL.items():
            rows = read_table(folder / name) if (folder / name).is_file() else []
            if rows and "slope" in rows[0]:
                title = _CALIBRATED
            if name == "groups.tsv":
                title += _by_chance(rows)
            if name == "internal_and_external.tsv" and 0 < of < FEW:
                title += f" The threshold is that of {of} validation scans: so few say nothing."
            text += (html.note(title) + html.table(rows)) if rows else ""
        for figure in ("roc", "calibration", *NUMBER_FIGURES):
            text += html.picture(folder / f"external_{figure}.png")
    return text


def _by_chance(rows: Sequence[Mapping[str, str]]) -> str:
    """What so many intervals do together, where none of the groups differs from the others."""
    given = sum(bool(row[name]) for row in rows for name in row if name.endswith("_low"))
    if not given:
        return f" Of {len(rows)} groups the largest and the smallest value differ by chance alone."
    return (
        f" {len(rows)} groups have {given} intervals, of which about {given / 20:.1f} miss the "
        "true value by chance: one that stands out among so many is no finding."
    )


_CALIBRATED = (
    "A slope of 1 and an intercept of 0 would be right, and an interval (95 %) that holds them "
    "does not contradict it. An intercept above 0: probabilities of the last class are too low. A "
    "row fitted to the cohort, each half with the other, is there where it has people enough."
)
_EXTERNAL = {
    "internal_and_external.tsv": "The run's own held-out people, and the cohort: 95 % intervals.",
    "calibration.tsv": "Brier scores. Slope and intercept need more people, one scan of each. A "
    "row fitted to the cohort, each half with the other, is there where it has people enough.",
    "shift.tsv": "The inputs beside those that were trained on; outside: share of the scans that "
    "lie more than half a standard deviation beyond them.",
    "groups.tsv": "By group; intervals where a group has enough people for one.",
}


def new_scans(run: Path) -> str:
    """Scans that nobody has labelled, classified with this run."""
    text = ""
    for folder in sorted(run.glob("new_scans*")):
        path = folder / "predictions.tsv"
        rows = read_table(path) if path.is_file() else []
        shown = [{k: v for k, v in row.items() if k not in ("path", "subject")} for row in rows]
        if not shown:
            continue
        text += f"<h3>{escape(folder.name)}</h3>\n" + html.table(shown)
        text += "".join(
            html.picture(folder / f"{row['scan']}_hirescam.png") for row in rows[:_DRAWN]
        )
    return text


_DRAWN = 3  # of new scans; all are on their own page
