"""`lightning-hybrid fit-model`: fit the generic performance model to a table of timings."""

import argparse
import csv
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from lightning_hybrid.asking.performance import PerformanceModel, fit
from lightning_hybrid.asking.terminal import terminal, write
from lightning_hybrid.errors import PlanError

EXTRINSIC = ("replicas", "stages", "stages_per_device", "microbatches", "devices")
"""Columns that are extrinsic factors by default (how a run is spread); all others are intrinsic
(what is computed)."""
PREDICTED = "predicted_s"
"""A column of predictions, which may have gaps. It is a factor only if an option names it."""
_FOLDS = 5
MeasuredRun = dict[str, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lightning-hybrid fit-model` to a parser."""
    parser.add_argument(
        "runs",
        nargs="+",
        help="CSV files with a line for each run and a head of names, such as those named "
        "hybrid_runs.csv that log_performance=True writes",
    )
    parser.add_argument("--time", default="step_s", help="column of the seconds; default: step_s")
    parser.add_argument(
        "--extrinsic",
        metavar="NAMES",
        help="columns of how a run is spread, separated by commas; default: those of "
        f"{', '.join(EXTRINSIC)} that vary",
    )
    parser.add_argument(
        "--intrinsic",
        metavar="NAMES",
        help="columns of what is computed; default: all other columns of numbers that vary, "
        f"but {PREDICTED}",
    )
    parser.add_argument(
        "--strength", type=float, default=1e-3, help="of the regulariser; default: 0.001"
    )
    parser.add_argument("--out", metavar="FILE", help="write the model as JSON")


def run(options: argparse.Namespace) -> None:
    """Run `lightning-hybrid fit-model`: fit a performance model to tables of runs, and print it.

    Args:
        options: what the parser has made of the command line, with the options of `add_options`.

    Raises:
        PlanError: a table cannot be read, or the runs do not determine the constants of the model.
    """
    if options.strength < 0:
        raise PlanError(f"--strength {options.strength}: 0 or more is needed")
    rows = _read(options.runs)
    _check_columns(rows, [options.time], "--time")
    others = [name for name in rows[0] if name not in (options.time, PREDICTED)]
    names = [name for name in others if _varies(rows, name)]
    extrinsic = _names(rows, options.extrinsic, "--extrinsic", [n for n in names if n in EXTRINSIC])
    rest = [name for name in names if name not in EXTRINSIC and name not in extrinsic]
    intrinsic = _names(rows, options.intrinsic, "--intrinsic", rest)
    times = [row[options.time] for row in rows]

    def fit_to(rows: Sequence[MeasuredRun], times: Sequence[float]) -> PerformanceModel:
        return fit(rows, times, intrinsic=intrinsic, extrinsic=extrinsic, strength=options.strength)

    model = fit_to(rows, times)
    console = terminal()
    console.print(model.describe())
    console.print(_held_out(rows, times, [*intrinsic, *extrinsic], fit_to))
    if options.out:
        write(options.out, model.to_json(), "model")


def _held_out(
    rows: Sequence[MeasuredRun],
    times: Sequence[float],
    names: Sequence[str],
    fit_to: Callable[[Sequence[MeasuredRun], Sequence[float]], PerformanceModel],
) -> str:
    """Cross-validate the model, and return a sentence on its error on runs that it has not seen.

    Args:
        rows: the measured runs: for each run its values, by name of the column.
        times: seconds of a step of each run.
        names: names of the factors; runs in which all factors are equal are held out together.
        fit_to: function that fits a model to runs and their seconds.
    """

    def configuration(index: int) -> list[float]:
        return [rows[index][name] for name in names]

    # runs of one configuration are held out together, so that the model has not seen it
    order = sorted(range(len(rows)), key=configuration)
    groups = [list(group) for _, group in groupby(order, key=configuration)]
    if len(groups) < 2 * _FOLDS:
        return f"Fewer than {2 * _FOLDS} configurations: none is held out to test the model."
    errors = []
    for fold in range(_FOLDS):
        out = [index for group in groups[fold::_FOLDS] for index in group]
        kept = [index for index in range(len(rows)) if index not in set(out)]
        try:
            model = fit_to([rows[i] for i in kept], [times[i] for i in kept])
        except PlanError as error:
            return f"Too few runs to hold some out ({error})."
        off = model.error_on([rows[i] for i in out], [times[i] for i in out])
        errors += [off] * len(out)
    return (
        f"On configurations that it has not seen (each of {len(groups)} held out once) it is off "
        f"by {sum(errors) / len(errors):.1%}."
    )


def _read(paths: Sequence[str]) -> list[MeasuredRun]:
    """Read the lines of all tables, with those columns of numbers that all tables have.

    Args:
        paths: the CSV files.

    Returns:
        For each line, which is a run, its numbers by name of the column.

    Raises:
        PlanError: a file cannot be read, has no lines, or a column has numbers and other values.
    """
    tables = [_read_one(path) for path in paths]
    shared = [name for name in tables[0][0] if all(name in table[0] for table in tables)]
    return [{name: row[name] for name in shared} for table in tables for row in table]


def _read_one(path: str) -> list[MeasuredRun]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"no table can be read from {path!r}: {error}") from error
    if not lines:
        raise PlanError(f"{path} has no runs: a head of names and a line for each run are needed")
    # columns of texts, such as dates, are left out
    numbers = [name for name in lines[0] if name and any(_number(line[name]) for line in lines)]
    if any(_number(line.get(PREDICTED)) is None for line in lines):
        numbers = [name for name in numbers if name != PREDICTED]
    rows = []
    for place, line in enumerate(lines, 2):
        row = {}
        for name in numbers:
            value = _number(line[name])
            if value is None:
                raise PlanError(f"{path}, line {place}: {name} is {line[name]!r}, not a number")
            row[name] = value
        rows.append(row)
    return rows


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _varies(rows: Sequence[MeasuredRun], name: str) -> bool:
    return len({row[name] for row in rows}) > 1


def _names(
    rows: Sequence[MeasuredRun], given: str | None, option: str, default: list[str]
) -> list[str]:
    if given is None:
        return default
    names = [name.strip() for name in given.split(",") if name.strip()]
    _check_columns(rows, names, option)
    return names


def _check_columns(rows: Sequence[MeasuredRun], names: Sequence[str], option: str) -> None:
    for name in names:
        if name not in rows[0]:
            raise PlanError(
                f"{option} {name}: there is no such column of numbers (there are "
                f"{', '.join(rows[0]) or 'none'})"
            )
