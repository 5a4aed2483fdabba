"""``python -m models.summary RUN``: what a run was, how long it took, what it reached."""

import csv
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from models.results import load_metrics
from models.tables import read_table

CONTENTS = {
    "config.yaml": "every setting of the run",
    "checkpoints": "best.ckpt, an ordinary Lightning checkpoint",
    "metrics.csv": "what was logged, step by step",
    "tensorboard": "the same for: tensorboard --logdir",
    "plan.json": "where each part of the network ran",
    "test_metrics.json": "metrics on held-out subjects",
    "test_predictions.tsv": "what the network says of each of them",
    "explain": "overlays, maps as NIfTI, explain.tsv, localisation.tsv",
    "report.html": "all of this on one page",
}


def main() -> None:
    """Print the summary of the run in the folder given as argument."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m models.summary RUN, the folder of a run")
    run, console = Path(sys.argv[1]), Console(width=100)
    for table in (_plan(run), _epochs(run), _test(run), _maps(run), _contents(run)):
        if table is not None:
            console.print(table)


def _plan(run: Path) -> Table | None:
    """The stages, if the run's strategy left a plan."""
    path = run / "plan.json"
    if not path.is_file():
        return None
    plan = json.loads(path.read_text())
    title = "plan: " + ", ".join(
        f"{plan[name]} {name}" for name in ("replicas", "stages", "microbatches") if name in plan
    )
    delays = plan.get("delays")  # in steps, of a delayed schedule
    more = ("delay",) if delays else ()
    table = Table("stage", "layers", "parameters", "load", "device", *more, title=title)
    for stage, row in enumerate(plan.get("rows", ())):
        cells = [
            stage,
            row["layers"],
            f"{row['parameters']:,}",
            f"{row['load']:.0%}",
            row["device"],
        ]
        table.add_row(*map(str, cells + ([delays[stage]] if delays else [])))
    return table


def _epochs(run: Path) -> Table | None:
    path = run / "metrics.csv"
    if not path.is_file():
        return None
    columns = {
        "train loss": "train/loss_epoch",
        "val loss": "val/loss",
        "val accuracy": "val/accuracy",
        "seconds": "epoch_s",
    }
    table = Table("epoch", *columns, title="training")
    for epoch, values in by_epoch(path).items():
        found = (values.get(name) for name in columns.values())
        table.add_row(epoch, *("" if value is None else f"{float(value):.3f}" for value in found))
    return table


def by_epoch(path: Path) -> dict[str, dict[str, str]]:
    """The values of each epoch; the file has one row per call of the logger."""
    epochs: dict[str, dict[str, str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            values = {name: value for name, value in row.items() if value}
            epochs.setdefault(values.get("epoch", ""), {}).update(values)
    epochs.pop("", None)
    return epochs


def _test(run: Path) -> Table | None:
    path = run / "test_metrics.json"
    if not path.is_file():
        return None
    table = Table("metric", "held-out subjects", "95 % interval", title="test")
    metrics = {k.removeprefix("test/"): v for k, v in load_metrics(path).items()}
    for name, value in metrics.items():
        if not name.endswith(("_low", "_high")):
            ends = [metrics.get(f"{name}_{end}") for end in ("low", "high")]
            interval = "" if None in ends else f"{ends[0]:.3f} to {ends[1]:.3f}"
            table.add_row(name, f"{value:.3f}", interval)
    return table


def _maps(run: Path) -> Table | None:
    """Where the maps point, beside a network that knows nothing."""
    path = run / "explain" / "localisation.tsv"
    rows = read_table(path) if path.is_file() else []
    if not rows or "peak_in" not in rows[0]:
        return None
    columns = ("network", "method", "scored", "peak_in", "peak_near", "times_chance")
    table = Table(*(name.replace("_", " ") for name in columns), title="planted region")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _contents(run: Path) -> Table:
    table = Table("where", "what", title="files")
    for name, what in CONTENTS.items():
        if (run / name).exists():
            table.add_row(str(run / name), what)
    return table


if __name__ == "__main__":
    main()
