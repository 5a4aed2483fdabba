"""Everything that is found out about a data folder before training: who, what, and is it sound."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from .adnimerge import read_histories
from .atomic import write_atomically
from .checks import check_records
from .collection import find_collection
from .errors import DataError, FolderError, Problem, tally
from .ida import discover, read_ida
from .labels import Task
from .records import ScanRecord, count_line

_EXAMPLES = 2  # of one kind of warning


@dataclass(frozen=True)
class Survey:
    """Records, problems (each makes a scan bad or names a missing one) and harmless warnings."""

    root: Path
    table: Path
    records: list[ScanRecord]
    problems: list[Problem]
    warnings: list[Problem]

    def summary(self) -> str:
        """Counts that add up, and what lies behind them."""
        reasons = Counter(r.reason.partition(":")[0] for r in self.records if r.reason)
        lines = [f"{self.root} with {self.table.name}", count_line(self.records)]
        if reasons:
            lines.append("excluded: " + ", ".join(f"{n} x {r}" for r, n in reasons.most_common()))
        if self.problems:
            lines.append(tally(self.problems))
        return "\n".join([*lines, *_by_kind(self.warnings)])


def _by_kind(warnings: Sequence[Problem]) -> list[str]:
    """One line per kind, which stands before the colon of the detail, with the first few."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for warning in warnings:
        kind, _, measures = warning.detail.partition(": ")
        kinds[f"{warning.code}, {kind}"].append(measures)
    lines = []
    for name, values in kinds.items():
        different = list(dict.fromkeys(values))
        dots = "; ..." if len(different) > _EXAMPLES else ""
        lines.append(f"warning: {len(values)} x {name}: {'; '.join(different[:_EXAMPLES])}{dots}")
    return lines


def survey(
    root: Path,
    task: Task,
    store: Path | None,
    *,
    collection_csv: Path | None = None,
    diagnosis_csv: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Find the scans, join them with their table, label them and read every used file to its end.

    Args:
        root: the download folder; nothing is written into it.
        task: which diagnoses become which label.
        store: file for the results of the reading, outside ``root``; None: files are not read.
        collection_csv: the collection table; None: the only one directly in ``root``.
        diagnosis_csv: ADNIMERGE, for diagnoses at each visit; None: the collection's groups.
        progress: called with (files read, files to read).

    Raises:
        DataError: the task needs diagnoses over time and there are none.
        FolderError: no such folder, or no scans in it.
        TableError: the collection table is missing, ambiguous or not understood.
    """
    root = root.absolute()  # paths in manifests must not depend on where a run was started
    if task.needs_history and diagnosis_csv is None:
        raise DataError(
            "NEEDS_HISTORY",
            f"task {task.name}: stable and progressive MCI differ in later visits only",
            action="name the ADNIMERGE table with --data.diagnosis_csv / --diagnosis-csv",
        )
    found = discover(root)  # first: a missing folder says more than a missing table
    collection = find_collection(root, collection_csv)
    histories = read_histories(diagnosis_csv) if diagnosis_csv else None
    reading = read_ida(found, collection, task, histories)
    if store is None:
        return Survey(root, collection.path, reading.records, reading.problems, [])
    records, problems, warnings = check_records(reading.records, store, progress=progress)
    return Survey(root, collection.path, records, reading.problems + problems, warnings)


def refuse_inside(root: Path, path: Path, what: str) -> None:
    """Raise unless ``path`` lies outside the data folder ``root``."""
    if path.resolve().is_relative_to(root.resolve()):
        raise FolderError(
            "INSIDE_DATA",
            f"{what} {path} lies inside the data folder, where nothing is ever written",
            str(root),
            f"give another {what}",
        )


def write_problems(path: Path, found: Survey) -> None:
    """Write problems and warnings as a tab-separated table, atomically."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(["level", *(field.name for field in fields(Problem))])
    writer.writerows(["problem", *astuple(problem)] for problem in found.problems)
    writer.writerows(["warning", *astuple(warning)] for warning in found.warnings)
    write_atomically(path, buffer.getvalue().encode())
