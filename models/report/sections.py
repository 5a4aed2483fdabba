"""The parts of a report, each from the files of a run; a part without its files is empty."""

import csv
import json
import shlex
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from models.drawing import figures_of
from models.metrics import never_named
from models.predictions import read_outputs
from models.report import html
from models.report.checklist import checklist, claim, model_card
from models.report.cohorts import external, new_scans
from models.report.flow import flow_chart
from models.results import beside, load_metrics, load_settings
from models.tables import read_table
from models.tasks import UNITS, is_number


def cohort(run: Path) -> str:
    """Who is in the data, and in which part."""
    parts = run / "parts.txt"
    rows = read_table(run / "cohort.tsv") if (run / "cohort.tsv").is_file() else []
    known = {name for row in rows for name, value in row.items() if value not in ("", "-")}
    text = html.table([{k: v for k, v in row.items() if k in known} for row in rows])
    if parts.is_file():
        text += html.note("Scans in each part; no subject is in two parts.")
        text += html.pre(parts.read_text())
    return text + flow_chart(run)


def curves(run: Path) -> str:
    """Loss and metrics of the validation over the epochs."""
    path = run / "metrics.csv"
    epochs = _by_epoch(path) if path.is_file() else {}
    panels = {
        "loss": {name: _points(epochs, name) for name in ("train/loss_epoch", "val/loss")},
        "validation": {name: _points(epochs, name) for name in _CURVES},
        "learning rate": _rates(path) if epochs else {},
    }
    if not any(points for lines in panels.values() for points in lines.values()):
        return ""
    figure = Figure(figsize=(11, 3), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels.items()):
        for name, points in lines.items():
            if points:
                axes.plot(*zip(*points), marker=".", label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step" if title == "learning rate" else "epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.lines:
            axes.legend(fontsize=8)
    return html.figure(figure)


_CURVES = ("val/accuracy", "val/auroc", "val/mae", "val/rmse")  # the former two are of classes


def _by_epoch(path: Path) -> dict[str, dict[str, str]]:
    """The values of each epoch; the file has one row per call of the logger."""
    epochs: dict[str, dict[str, str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values = {name: value for name, value in row.items() if value}
            epochs.setdefault(values.get("epoch", ""), {}).update(values)
    epochs.pop("", None)
    return epochs


def _points(epochs: dict[str, dict[str, str]], name: str) -> list[tuple[int, float]]:
    return [(int(epoch), float(v[name])) for epoch, v in epochs.items() if name in v]


def _rates(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Learning rates by step: what LearningRateMonitor logs has no epoch."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name.startswith("lr-")]
    # the last line of a run that was killed may end anywhere
    whole = [row for row in rows if row["step"]]
    return {n: [(int(row["step"]), float(row[n])) for row in whole if row[n]] for n in names}


def metrics(run: Path) -> str:
    """Each test: what it was of, its metrics with intervals, and three figures."""
    text, how = "", _OF_CLASSES
    for path in sorted(run.glob("test_metrics*.json"), key=_number):
        values = {k.removeprefix("test/"): v for k, v in load_metrics(path).items()}
        columns: dict[str, dict[str, Any]] = {"held-out subjects (95 %)": values}
        simple = beside(path, "baseline", ".json")
        said = (load_settings(simple) or {}).get("verdict", "")
        if said:
            columns["baseline, the same subjects (95 %)"] = load_metrics(simple)
        rows: list[dict[str, Any]] = [
            {"metric": name}
            | {
                f"{column}{end}": found.get(f"{name}{end}", "")
                for column, found in columns.items()
                for end in ("", "_low", "_high")
            }
            for name in values
            if not name.endswith(("_low", "_high"))
        ]
        text += f"<h3>{path.stem}</h3>\n" + html.note(_of_what(load_settings(path)))
        table = beside(path, "predictions", ".tsv")
        outputs, labels, names = read_outputs(read_table(table) if table.is_file() else [])
        text += html.note(said) if said else ""
        if is_number(names):
            how = "BCa bootstrap of people"
            text += html.note(_OF_NUMBER.format(unit=UNITS[names[0]]))
        elif never := never_named(outputs, names) if names else "":
            text += html.note(never)
        text += html.table(rows)
        figures = figures_of(names) if len(labels) else {}
        text += "".join(html.figure(draw(outputs, labels, names)) for draw in figures.values())
    if not text:
        return ""
    return text + html.note(
        f"Intervals: {how}; none where people are too few for one that holds. They say how much "
        "the choice of held-out people matters, not how much another training run would."
    )


_OF_CLASSES = (
    "Wilson for shares, Newcombe's method 5 scaled by DeLong's variance for the AUROC, BCa "
    "bootstrap for Brier score and MCC"
)
_OF_NUMBER = (
    "mae, rmse and bias (told minus true) are in {unit}. An r2 of 0 and a bias slope (how the "
    "error changes with the true number) of -1 are those of whoever tells everybody the mean."
)


def _number(path: Path) -> int:
    last = path.stem.rpartition("_")[2]
    return int(last) if last.isdigit() else 1


def _of_what(settings: dict[str, Any] | None) -> str:
    """What a result depends on, in words."""
    if not settings:
        return "Of settings that the file does not say."
    known = dict(settings)
    shape = " x ".join(map(str, known.pop("spatial_shape", ())))
    text = f"Checkpoint {known.pop('checkpoint', 'unknown')}; "
    text += f"{shape} voxels of {known.pop('spacing_mm', 'unknown')} mm; "
    if known.pop("shuffled", False):
        text += "labels shuffled, so a result near chance is right; "
    text += f"scans and labels {known.pop('scans', 'unknown')} (equal where those are)"
    return text + "".join(f"; {name} {value}" for name, value in known.items()) + "."


def explanations(run: Path) -> str:
    """Overlays of each case, and the mean maps."""
    path = run / "explain" / "explain.json"
    if not path.is_file():
        return ""
    record = json.loads(path.read_text())
    shows = record.get("evidence", f"evidence for {record['explained']}")
    whose = "" if record.get("number") else " of a class"
    text = html.note(
        f"{shows[0].upper()}{shows[1:]}, the hottest twentieth of the head. Cyan: the hottest "
        "point. Green: the planted region, if the scans are synthetic. Cases were taken about the "
        "median of their scores, not for their looks."
    )
    for case in record["cases"]:
        text += f"<h3>{escape(case['title'])}</h3>\n" + html.note(case["meaning"])
        text += "".join(html.picture(path.parent / one["file"]) for one in case["pictures"])
        if "page" in case:
            text += html.note(f"To click through the slices: explain/{case['page']}")
    text += "<h3>Mean maps</h3>\n" + html.note(
        f"Over all held-out scans{whose}. They can be read only where the scans are registered to "
        "one space."
    )
    return text + "".join(html.picture(path.parent / name) for name in record["means"])


def localisation(run: Path) -> str:
    """Scores of the maps, beside networks that know nothing."""
    folder = run / "explain"
    if not (folder / "localisation.tsv").is_file():
        return ""
    rows = read_table(folder / "localisation.tsv")
    text = html.table(_turned(rows))
    if rows and "peak_in" in rows[0]:
        of, right = "", ""
        if "right" in rows[0]:
            of = " of the explained class"
            right = "right, right times: peak in, times chance over the correctly classified; "
        text += html.note(
            f"All held-out scans{of}. peak in: the hottest voxel lies in the planted region; near: "
            "or within a cell of it; times chance: the share of the map in the region over what a "
            f"flat map inside the head has; {right}precision: of the hottest voxels, as many as "
            "the region has; like effect: rank correlation with the strength of the planted change."
        )
    text += html.note(
        "places: at how many different places the peaks of these scans are. One place for all of "
        "them is a difference between the groups, and says nothing of a single patient."
    )
    text += html.note(
        "like trained: rank correlation with the trained network's map. A method that shows the "
        "same for an untrained network, or for one trained on shuffled labels, shows the anatomy "
        "and not what was learnt. like mirrored: with the map of the mirrored scan."
    )
    if not any(row["network"] == "shuffled" for row in rows):
        text += html.note(
            "No network trained on shuffled labels is here: fit once more with "
            "--data.shuffle_labels true and give its checkpoint to explain as --shuffled_ckpt."
        )
    regions = read_table(folder / "regions.tsv")
    if regions:
        text += "<h3>Share of the mean map by region</h3>\n" + html.table(regions)
        text += html.note("Boxes in the space of the MNI152 template: for registered scans only.")
    return text


def _turned(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A column for each map: there are more scores than a page is wide."""
    of_map = ("network", "method", "layer")
    names = [" ".join(filter(None, map(row.get, of_map))) for row in rows]
    scores = [name for name in (rows[0] if rows else {}) if name not in of_map]
    return [
        {"score": score.replace("_", " ")} | {n: row[score] for n, row in zip(names, rows)}
        for score in scores
    ]


def plan(run: Path) -> str:
    """Where each part of the network ran."""
    path = run / "plan.json"
    if not path.is_file():
        return ""
    record: dict[str, Any] = json.loads(path.read_text())
    delays = record.get("delays")
    rows = [
        {
            "stage": stage,
            "layers": row["layers"],
            "parameters": f"{row['parameters']:,}",
            "load": f"{row['load']:.0%}",
            "device": row["device"],
            **({"delay": delays[stage]} if delays else {}),
            "from": row["partitions"][0] if row.get("partitions") else "",
        }
        for stage, row in enumerate(record.get("rows", ()))
    ]
    head = ", ".join(
        f"{record[name]} {one if record[name] == 1 else many}"
        for name, one, many in (
            ("replicas", "replica", "replicas"),
            ("stages", "stage", "stages"),
            ("microbatches", "micro-batch", "micro-batches"),
        )
        if name in record
    )
    text = html.note(f"{head}; schedule {record.get('schedule', 'unknown')}.") + html.table(rows)
    if delays:
        text += html.note("delay: by how many steps the weights of a stage are too old.")
    page = path.with_suffix(".html")
    return text + (html.note(f"The page of the plan: {page.name}") if page.is_file() else "")


def again(run: Path) -> str:
    """The environment, and how to run it again."""
    explain = _command(run / "explain") or (
        f"python -m models explain --config {run}/config.yaml --ckpt_path "
        f"{run}/checkpoints/best.ckpt"
    )
    commands = [
        f"python -m models fit --config {run}/config.yaml",
        f"python -m models test --config {run}/config.yaml --ckpt_path {run}/checkpoints/best.ckpt",
        explain,
        f"python -m models report {run}",
    ]
    text, path = "", run / "environment.json"
    if path.is_file():
        record = json.loads(path.read_text())
        values = record["environment"].items()
        text += html.table([{"name": name, "value": str(value)} for name, value in values])
        text += html.note("The run was started with:") + html.pre(shlex.join(record["command"]))
    text += html.note("The same again, from its own settings:") + html.pre("\n".join(commands))
    return text + "<h3>Settings</h3>\n" + html.pre((run / "config.yaml").read_text())


def _command(folder: Path) -> str:
    """What made a folder; empty if that is not known."""
    path = folder / "environment.json"
    return shlex.join(json.loads(path.read_text())["command"]) if path.is_file() else ""


SECTIONS: dict[str, Callable[[Path], str]] = {
    "Cohort": cohort,
    "Training": curves,
    "Test": metrics,
    "Other cohorts": external,
    "New scans": new_scans,
    "What the network looks at": explanations,
    "Does it look at the right place?": localisation,
    "Plan": plan,
    "Model card": model_card,
    "What a publication has to say (TRIPOD+AI)": checklist,
    "What a publication on imaging has to say (CLAIM)": claim,
    "Environment, and how to run it again": again,
}
