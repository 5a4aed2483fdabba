"""What a report after TRIPOD+AI asks for (Collins et al., BMJ 2024), and what a run has recorded.

Numbers are those of its items; what only the authors can say is left to them, by name. The items on
data, preparation, reference standard and evaluation are also those of CLAIM (Tejani et al. 2024).
"""

import json
from html import escape
from pathlib import Path
from typing import Any

import yaml

from models.card import card
from models.report import html

_AUTHORS = "(for the authors)"
_TITLES = {
    "Input": "7, 9",
    "Training data": "20b, 21",
    "Model": "12c, 22",
    "Evaluation: the run's own held-out people": "23a",
    "Evaluation: other cohorts": "16, 23a",
    "Groups": "12d, 14, 23b",
    "Calibration": "12f, 24",
    "Limits": "26",
    "Intended use": "27",
}


def model_card(run: Path) -> str:
    """The card of the run's best checkpoint."""
    best = run / "checkpoints" / "best.ckpt"
    if not best.is_file():
        return ""
    return "".join(f"<h3>{escape(name)}</h3>\n" + html.note(text) for name, text in card(best))


def checklist(run: Path) -> str:
    """The items, with what is known; nothing for a run without a checkpoint."""
    best = run / "checkpoints" / "best.ckpt"
    if not best.is_file():
        return ""
    known = dict(card(best))
    rows = [
        ("1, 2", "title and abstract name the kind of study, the people and the outcome", _AUTHORS),
        ("3, 4", "background, known inequalities, objectives", _AUTHORS),
        ("5a, 6a", "sources of the data, setting", _sources(run)),
        (
            "5b",
            "dates of the data",
            "acquisition dates are in the manifest, which is not published",
        ),
        ("6b, 20a", "who was eligible, and the flow of participants", _flow(run)),
        ("6c", "treatments received", _AUTHORS),
        ("8a", "outcome, and how it was assessed", _outcome(run)),
        ("8b, 8c", "who assessed it, and what they knew", _AUTHORS),
        ("10", "how the sample size was arrived at", _AUTHORS),
        ("11", "missing data", "scans without a label are excluded; see the flow of participants"),
        ("12a", "how the data were divided", _divided(run)),
        ("12e", "measures of performance", "those of the table of the test, with their intervals"),
        ("13", "class imbalance", _setting(run, "model", "class_weights", "class weights")),
        ("15", "what the model gives", "a probability of each class, also calibrated"),
        ("17 to 19", "ethics, funding, registration, sharing, public involvement", _AUTHORS),
        ("25", "interpretation", _AUTHORS),
    ]
    rows += [(number, name.lower(), known[name]) for name, number in _TITLES.items()]
    rows.sort(key=lambda row: int(row[0].split(",")[0].split()[0].rstrip("abcdef")))
    shown = [{"item": n, "what is asked": what, "this run": text} for n, what, text in rows]
    return html.table(shown) + html.note(
        "Item numbers of TRIPOD+AI. CLAIM asks for the same facts on data, preparation, reference "
        "standard, model and evaluation."
    )


def _settings(run: Path) -> dict[str, Any]:
    found = yaml.safe_load((run / "config.yaml").read_text())
    return found if isinstance(found, dict) else {}


def _setting(run: Path, part: str, name: str, words: str) -> str:
    value = _settings(run).get(part, {}).get(name)
    return f"{words}: {value if value is not None else 'none'}"


def _sources(run: Path) -> str:
    root = _settings(run).get("data", {}).get("root", "")
    return f"{Path(str(root)).name or 'not recorded'}; its terms, sites and years {_AUTHORS}"


def _outcome(run: Path) -> str:
    data = _settings(run).get("data", {})
    horizon = f", horizon {data['horizon_months']:g} months" if data.get("horizon_months") else ""
    return f"task {data.get('task', 'not recorded')}{horizon}; the rule is in docs/adni.md"


def _flow(run: Path) -> str:
    path = run / "flow.json"
    if not path.is_file():
        return "not recorded"
    counts = json.loads(path.read_text())
    sizes = ", ".join(
        f"{counts[name]['scans']} {name}" for name in ("found", "excluded", "bad", "used")
    )
    return f"scans: {sizes}; the chart is in the section on the cohort"


def _divided(run: Path) -> str:
    data = _settings(run).get("data", {})
    if data.get("split_file"):
        return f"by person, from the file {Path(str(data['split_file'])).name}"
    if data.get("leave_out"):
        return f"by person; tested on {data['leave_out']}, which nothing was trained on"
    return (
        f"by person, stratified, seed {data.get('seed', 0)}: "
        f"{data.get('val_fraction', 0.15):.0%} for validation, "
        f"{data.get('test_fraction', 0.15):.0%} for testing"
    )
