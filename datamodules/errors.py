"""The exceptions of the data module.

    DataError                 anything that is wrong with the data or the options about them
    ├── FolderError           a folder that is missing, empty, or must not be written to
    ├── TableError            a CSV file that is missing, ambiguous or cannot be understood
    ├── ProblemsError         problems with single scans or subjects, all of them at once
    ├── SplitError            a split that leaks, does not fit the data or cannot be made
    └── ScanReadError         a scan that could not be read while training

Every message says what was found, where, and what to do next. All of them hold plain values only,
so they travel between processes (data loader workers, spawned ranks) unharmed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import indent

NO_SCAN = "NO_SCAN"  # the one problem that is not about a scan that was found
_SHOWN = 5  # problems of a kind


class DataError(Exception):
    """Something is wrong with the data.

    Args:
        code: short capital word, stable, for tests and scripts.
        found: what was found, with the offending value.
        where: file or folder.
        action: what to do next.
    """

    def __init__(self, code: str, found: str = "", where: str = "", action: str = "") -> None:
        super().__init__(code, found, where, action)
        if not found:  # PyTorch raises a worker's error again from its text alone
            code, found = "", code
        self.code, self.found, self.where, self.action = code, found, where, action

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.found}" if self.code else self.found]
        lines += [f"  where: {self.where}"] if self.where else []
        lines += [f"  next:  {self.action}"] if self.action else []
        return "\n".join(lines)


class FolderError(DataError):
    """A folder is missing, holds no scans, or must not be written to."""


class TableError(DataError):
    """A table is missing, ambiguous or cannot be understood."""


class SplitError(DataError):
    """A split leaks, does not fit the data or cannot be made."""


class ScanReadError(DataError):
    """A scan that passed the check could not be read later."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one scan, row or subject.

    Attributes:
        code: short capital word, e.g. ``CORRUPT_GZIP``.
        detail: what was found.
        action: what to do about it.
        path: the file, or the table and line.
        subject: subject, when known.
        image_id: image ID, when known.
        scans: how many scans it concerns; the others are like the one named.
    """

    code: str
    detail: str
    action: str
    path: str = ""
    subject: str = ""
    image_id: str = ""
    scans: int = 1

    def __str__(self) -> str:
        many = f"{self.scans} scans, first" if self.scans > 1 else ""
        who = " ".join(part for part in (self.code, many, self.subject, self.image_id) if part)
        return f"{who}: {self.detail}\n    {self.path}\n    -> {self.action}"


def tally(problems: Iterable[Problem]) -> str:
    """How many scans have which problem; and the rows that have no scan, which are not scans."""
    counts: Counter[str] = Counter()
    for problem in problems:
        counts[problem.code] += problem.scans
    rows = counts.pop(NO_SCAN, 0)
    bad = ", ".join(f"{n} x {code}" for code, n in counts.most_common())
    parts = [f"bad: {bad}" if bad else "", f"rows without a file: {rows} x {NO_SCAN}" * bool(rows)]
    return "; ".join(part for part in parts if part)


def listing(problems: Iterable[Problem]) -> str:
    """The first problems of each kind in full, and how many more there are."""
    kinds: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        kinds[problem.code].append(problem)
    lines = []
    for code, alike in kinds.items():
        lines += [str(problem) for problem in alike[:_SHOWN]]
        if len(alike) > _SHOWN:
            lines.append(f"{code}: {len(alike) - _SHOWN} more, see problems.tsv")
    return "\n".join(lines)


class ProblemsError(DataError):
    """Problems with single scans or subjects, collected over the whole data set."""

    def __init__(self, problems: Sequence[Problem], where: str = "", report: str = "") -> None:
        self.problems = tuple(problems)
        super().__init__(
            "PROBLEMS",
            f"found before the first step: {tally(self.problems)}",
            where,
            "repair or remove what is named, or go on without it: --data.on_bad skip"
            + (f"; full list: {report}" if report else ""),
        )
        self.report = report
        # unpickling calls the class with `args`
        self.args = (self.problems, where, report)

    def __str__(self) -> str:
        return f"{super().__str__()}\n{indent(listing(self.problems), '  ')}"
