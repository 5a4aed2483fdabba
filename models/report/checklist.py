"""What reports after TRIPOD+AI and CLAIM ask for, and what a run has recorded.

Numbers are those of the items (Collins et al., BMJ 2024; Mongan, Moy and Kahn, Radiology: AI 2020,
the 42 items that journals still ask for by these numbers). What only the authors can say is left to
them, by name.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

import yaml

from models.card import card
from models.report import html
from models.tables import read_table
from models.tasks import CLASSES, is_number

_AUTHORS = "(for the authors)"
_TITLES = {
    "Input": "7, 9",
    "Training data": "20b, 21",
    "Model": "12c, 22",
    "Evaluation: the run's own held-out people": "23a",
    "Evaluation: other cohorts": "16, 23a",
    "Groups": "12d, 14, 23b",
    "Calibration": "12f, 24",
    "Error": "12f, 24",
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
        (
            "11",
            "missing data",
            "scans without a label or number are excluded; see the flow of participants",
        ),
        ("12a", "how the data were divided", _divided(run)),
        ("12e", "measures of performance", "those of the table of the test, with their intervals"),
        *_of_kind(run),
        ("17 to 19", "ethics, funding, registration, sharing, public involvement", _AUTHORS),
        ("25", "interpretation", _AUTHORS),
    ]
    rows += [
        (number, name.lower(), known[name]) for name, number in _TITLES.items() if name in known
    ]
    rows.sort(key=lambda row: int(row[0].split(",")[0].split()[0].rstrip("abcdef")))
    shown = [{"item": n, "what is asked": what, "this run": text} for n, what, text in rows]
    return html.table(shown) + html.note("Item numbers of TRIPOD+AI.")


def claim(run: Path) -> str:
    """The items of CLAIM, with what is known; nothing for a run without a checkpoint."""
    best = run / "checkpoints" / "best.ckpt"
    if not best.is_file():
        return ""
    known = dict(card(best))
    tested = known["Evaluation: the run's own held-out people"]
    rows = [
        ("1, 2", "title and abstract name the method", f"3D convolutional network; {_AUTHORS}"),
        ("3, 4", "background, objectives", _AUTHORS),
        ("5, 6", "prospective or retrospective; goal", _AUTHORS),
        ("7", "sources of the data", _sources(run)),
        ("8", "eligibility", _flow(run)),
        ("9", "preprocessing", known["Input"]),
        ("10", "selection of subsets", "one series a visit, by the rule in docs/adni.md"),
        ("11", "definition of data elements", _outcome(run)),
        ("12", "de-identification", f"hashes of people in the checkpoint; of the data {_AUTHORS}"),
        (
            "13",
            "missing data",
            "scans without a label or number are excluded; see the flow of participants",
        ),
        ("14, 15", "reference standard and its rationale", _outcome(run)),
        ("16 to 18", "who gave it, with what tools, how reliably", _AUTHORS),
        ("19", "sample size", f"{known['Training data']} How it was arrived at: {_AUTHORS}"),
        ("20, 21", "partitions, and the level at which they are disjoint", _divided(run)),
        ("22", "the model", known["Model"]),
        ("23", "software", _software(run)),
        ("24", "initial weights", _setting(run, "model", "transfer_from", "transferred from")),
        ("25", "training", f"{known['Model']} All settings: config.yaml"),
        ("26", "how the final model was chosen", "best epoch on the validation people"),
        ("27", "ensembles", "none"),
        ("28, 29", "metrics and their uncertainty", "the table of the test, with intervals"),
        ("30", "robustness", f"{known['Groups']} Of training runs: `python -m models folds`"),
        ("31", "explainability", _explained(run)),
        ("32", "validation on external data", known["Evaluation: other cohorts"]),
        ("33", "flow of participants", _flow(run)),
        ("34", "demographics", "the table of the cohort; for each partition the authors"),
        ("35, 36", "performance and its precision", tested),
        (
            "37",
            "failures",
            f"the rows of test_predictions.tsv {_wrong(run)}; their analysis {_AUTHORS}",
        ),
        ("38", "limitations", known["Limits"]),
        ("39", "implications, intended use", known["Intended use"]),
        ("40 to 42", "registration, protocol, funding", _AUTHORS),
    ]
    shown = [{"item": n, "what is asked": what, "this run": text} for n, what, text in rows]
    return html.table(shown) + html.note("Item numbers of CLAIM 2020.")


def _tells_number(run: Path) -> bool:
    return is_number(CLASSES.get(_settings(run).get("data", {}).get("task", ""), ()))


def _of_kind(run: Path) -> list[tuple[str, str, str]]:
    """The items that are other ones for a number than for classes."""
    if _tells_number(run):
        return [("15", "what the model gives", "a number, and its error on validation scans")]
    return [
        ("13", "class imbalance", _setting(run, "model", "class_weights", "class weights")),
        ("15", "what the model gives", "a probability of each class, also calibrated"),
    ]


def _wrong(run: Path) -> str:
    if _tells_number(run):
        return "of the largest error"
    return "where class and predicted class differ"


def _software(run: Path) -> str:
    path = run / "environment.json"
    if not path.is_file():
        return "not recorded"
    found = json.loads(path.read_text())["environment"]
    names = ("python", "torch", "lightning", "monai", "nibabel", "numpy")
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def _explained(run: Path) -> str:
    path = run / "explain" / "localisation.tsv"
    if not path.is_file():
        return "none: `python -m models explain`"
    methods = dict.fromkeys(row["method"] for row in read_table(path))
    return f"{', '.join(methods)}, beside networks that know nothing; see the section on maps"


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
    data, horizon = _settings(run).get("data", {}), ""
    if data.get("horizon_months") and not _tells_number(run):
        horizon = f", horizon {data['horizon_months']:g} months"
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
