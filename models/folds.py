"""``python -m models folds --config FILE --folds K``: train and test K runs, and sum them up."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UseError
from models.intervals import intervals
from models.metrics import evaluate
from models.results import load_metrics, writable
from models.tables import read_table, write_table

DONE = "done.json"


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m models folds",
        description="Cross-validation: for each fold, train on the others, choose the best epoch "
        "on it, and test on the held-out subjects that are in no fold. What is not named here goes "
        "to every `fit` and `test`. A stopped command goes on where it was.",
        allow_abbrev=False,  # what is cut short goes to `fit`, which refuses it
    )
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--folds", required=True, type=int)
    parser.add_argument("--out", default=Path("folds"), type=Path, help="folder of the runs")
    options, rest = parser.parse_known_args(arguments)
    if options.folds < 2:
        raise UseError(f"--folds {options.folds}: give 2 or more.")
    if not options.config.is_file():
        raise UseError(
            f"There is no configuration {options.config}. Give a YAML file, as configs/modern.yaml "
            "or the config.yaml of a run."
        )
    writable(options.out)
    runs = [_run(options, fold, rest) for fold in range(options.folds)]
    summary = summarise(runs)
    write_table(summary, options.out / "folds.tsv")
    for row in summary:
        print("  ".join(f"{_shown(value):>18}" for value in row.values()))
    print(f"summary written to {options.out / 'folds.tsv'}")


def _run(options: argparse.Namespace, fold: int, rest: Sequence[str]) -> Path:
    """Train and test one fold, unless that is done already; returns the run's folder."""
    folder = writable(options.out / f"fold_{fold}")
    own = _settings(folder, options.folds, fold)
    wanted = {"config": options.config.read_text(), "own": own, "arguments": list(rest)}
    mark = folder / DONE
    if mark.is_file():
        record = json.loads(mark.read_text())
        if record["wanted"] != wanted:
            raise UseError(f"{folder} has a run of other settings; give another --out.")
        return Path(record["run"])
    # JSON is YAML; a second file replaces what the first one says
    (folder / "fold.yaml").write_text(json.dumps(own, indent=1) + "\n")
    config = ["--config", str(options.config), "--config", str(folder / "fold.yaml"), *rest]
    _models("fit", *config)
    best = max(folder.glob("run/*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
    run = best.parents[1]
    _models("test", *config, "--ckpt_path", str(best))
    mark.write_text(json.dumps({"wanted": wanted, "run": str(run)}) + "\n")
    return run


def _settings(folder: Path, folds: int, fold: int) -> dict[str, Any]:
    """What a fold's configuration has of its own."""
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "run"},
    }
    return {"trainer": {"logger": [logger]}, "data": {"folds": folds, "fold": fold}}


def _models(*arguments: str) -> None:
    command = [sys.executable, "-m", "models", *arguments]
    print("$ python " + " ".join(command[1:]), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise UseError(f"`models {arguments[0]}` failed, see above; the folds so far are kept.")


def summarise(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """One row per metric: mean and standard deviation over the folds, and of their mean vote.

    All folds test the same subjects, so their tests are no independent samples: the spread says
    what training on others changes, and the interval of the vote what testing on others would.
    """
    found = [load_metrics(run / "test_metrics.json") for run in runs]
    vote, bounds = _vote(runs)
    rows = []
    for name in vote:
        values = [metrics[f"test/{name}"] for metrics in found if f"test/{name}" in metrics]
        row: dict[str, Any] = {"metric": name, "folds": len(values)}
        row["mean"] = float(np.mean(values)) if values else ""
        row["sd"] = float(np.std(values, ddof=1)) if len(values) > 1 else ""
        low, high = bounds.get(name, ("", ""))
        rows.append(row | {"vote": vote[name], "vote_low": low, "vote_high": high})
    return rows


def _vote(runs: Sequence[Path]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Metrics of the mean probabilities over the folds, and their intervals."""
    tables = [read_table(run / "test_predictions.tsv") for run in runs]
    scans = [[row["image_id"] for row in table] for table in tables]
    if any(names != scans[0] for names in scans):
        raise UseError("The folds were tested on different scans; remove their folder, run anew.")
    columns = [name for name in tables[0][0] if name.startswith("p_")]
    each = [[[float(row[name]) for name in columns] for row in table] for table in tables]
    probabilities = np.mean(each, axis=0)
    labels = np.array([int(row["label"]) for row in tables[0]])
    subjects = [row["subject"] for row in tables[0]]
    return evaluate(probabilities, labels), intervals(probabilities, labels, subjects)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
