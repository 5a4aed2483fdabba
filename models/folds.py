"""``python -m models folds --config FILE --folds K``: train and test K runs, and sum them up."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UseError
from models.metrics import Array
from models.predictions import read_outputs
from models.results import load_metrics, writable
from models.scores import evaluate, intervals, not_learnt
from models.tables import read_table, write_table

DONE = "done.json"


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m models folds",
        description="Cross-validation: for each fold, train on the others, choose the best epoch "
        "on it, and test on the held-out subjects that are in no fold. With --data.test_fraction 0 "
        "everybody is tested on once: a fold tests, the next one chooses the epoch. With "
        "--leave_out, once for each cohort or site, these are the test sets. What is not named "
        "here goes to every `fit` and `test`. A stopped command goes on where it was.",
        allow_abbrev=False,  # what is cut short goes to `fit`, which refuses it
    )
    parser.add_argument("--config", required=True, type=Path)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--folds", type=int)
    how.add_argument(
        "--leave_out", action="append", metavar="cohort=NAME|site=NUMBER", help="give it repeatedly"
    )
    parser.add_argument("--out", default=Path("folds"), type=Path, help="folder of the runs")
    options, rest = parser.parse_known_args(arguments)
    if not options.leave_out and options.folds < 2:
        raise UseError(f"--folds {options.folds}: give 2 or more.")
    if not options.config.is_file():
        raise UseError(
            f"There is no configuration {options.config}. Give a YAML file, as configs/modern.yaml "
            "or the config.yaml of a run."
        )
    writable(options.out)
    runs = {
        name: _run(options, name, data, rest)
        for name, data in _parts(options.folds, options.leave_out).items()
    }
    tables = {name: read_table(run / "test_predictions.tsv") for name, run in runs.items()}
    if _same_people(tables):
        vote = _vote(list(tables.values()))
    else:
        everybody = out_of_fold(tables)
        write_table(everybody, options.out / "out_of_fold.tsv")
        print(f"everybody's predictions written to {options.out / 'out_of_fold.tsv'}")
        vote = _measured(everybody)
    summary = summarise(list(runs.values()), *vote)
    write_table(summary, options.out / "folds.tsv")
    for row in summary:
        print("  ".join(f"{_shown(value):>18}" for value in row.values()))
    print(f"summary written to {options.out / 'folds.tsv'}")
    from models.card import write_card_of_folds  # reads checkpoints, which takes seconds

    write_card_of_folds(options.out)
    print(f"all of them as one model: --ckpt_path {options.out}, for `predict` and `test --cohort`")


def checkpoints_of(folder: Path) -> dict[str, Path]:
    """The checkpoint of each finished run in a folder of this command, by its name.

    Raises:
        UseError: There is none.
    """
    marks = sorted(folder.glob(f"*/{DONE}"))
    if not marks:
        raise UseError(f"{folder} has no finished runs; give a checkpoint, or --out of `folds`.")
    found = {}
    for mark in marks:
        run = mark.parent / "run" / Path(json.loads(mark.read_text())["run"]).name
        newest = max(run.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime)
        found[mark.parent.name] = newest
    return found


def _parts(folds: int, leave_out: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """What the data module of each run is told, by the name of the run."""
    if leave_out:
        return {f"without_{_word(group)}": {"leave_out": group} for group in leave_out}
    return {f"fold_{fold}": {"folds": folds, "fold": fold} for fold in range(folds)}


def _word(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def _run(
    options: argparse.Namespace, name: str, data: Mapping[str, Any], rest: Sequence[str]
) -> Path:
    """Train and test one of them, unless that is done already; returns the run's folder."""
    folder = writable(options.out / name)
    own = _settings(folder, data)
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


def _settings(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's configuration has of its own."""
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "run"},
    }
    return {"trainer": {"logger": [logger]}, "data": dict(data)}


def _models(*arguments: str) -> None:
    command = [sys.executable, "-m", "models", *arguments]
    print("$ python " + " ".join(command[1:]), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise UseError(f"`models {arguments[0]}` failed, see above; the folds so far are kept.")


Row = dict[str, Any]
Measured = tuple[dict[str, float], dict[str, tuple[float, float]]]
"""Metrics, and the ends of their intervals."""


def _same_people(tables: Mapping[str, Sequence[Mapping[str, str]]]) -> bool:
    """Whether all were tested on the same people; False if no two share one.

    Raises:
        UseError: some people were tested on by several of them, and not by all.
    """
    people = [{row["subject"] for row in table} for table in tables.values()]
    if all(own == people[0] for own in people):
        return True
    if sum(map(len, people)) == len(set().union(*people)):
        return False
    raise UseError("The folds were tested on different scans; remove their folder, run anew.")


def out_of_fold(tables: Mapping[str, Sequence[Mapping[str, str]]]) -> list[Row]:
    """Everybody's prediction, each by a network that has not seen this person."""
    return [{"run": name, **row} for name, table in tables.items() for row in table]


def summarise(
    runs: Sequence[Path],
    together: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> list[Row]:
    """One row per metric: mean and standard deviation over the runs, and of all of them together.

    Where all runs test the same subjects, their tests are no independent samples: the spread says
    what training on others changes, and the interval of the vote what testing on others would.

    Args:
        runs: their folders.
        together: metrics of the mean outputs of the same people, or of all people at once.
        bounds: their intervals.
    """
    found = [load_metrics(run / "test_metrics.json") for run in runs]
    rows = []
    for name, value in together.items():
        values = [metrics[f"test/{name}"] for metrics in found if f"test/{name}" in metrics]
        row: Row = {"metric": name, "folds": len(values)}
        row["mean"] = float(np.mean(values)) if values else ""
        row["sd"] = float(np.std(values, ddof=1)) if len(values) > 1 else ""
        low, high = bounds.get(name, ("", ""))
        rows.append(row | {"vote": value, "vote_low": low, "vote_high": high})
    return rows


def _vote(tables: Sequence[Sequence[Mapping[str, str]]]) -> Measured:
    """Metrics of the mean outputs over the folds, and their intervals."""
    scans = [[row["image_id"] for row in table] for table in tables]
    if any(names != scans[0] for names in scans):
        raise UseError("The folds were tested on different scans; remove their folder, run anew.")
    outputs = np.mean([read_outputs(table)[0] for table in tables], axis=0)
    return _evaluated(outputs, tables[0])


def _measured(table: Sequence[Mapping[str, str]]) -> Measured:
    """Metrics of a table of predictions, and their intervals."""
    return _evaluated(read_outputs(table)[0], table)


def _evaluated(outputs: Array, table: Sequence[Mapping[str, str]]) -> Measured:
    _, labels, names = read_outputs(table)
    subjects = [row["subject"] for row in table]
    if said := not_learnt(outputs, labels, names):
        print(said)
    return evaluate(outputs, labels), intervals(outputs, labels, subjects)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
