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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
    """

    code: str
    detail: str
    action: str
    path: str = ""
    subject: str = ""
    image_id: str = ""

    def __str__(self) -> str:
        who = " ".join(part for part in (self.subject, self.image_id) if part)
        return f"{self.code} {who}: {self.detail}\n    {self.path}\n    -> {self.action}"


class ProblemsError(DataError):
    """Problems with single scans or subjects, collected over the whole data set."""

    _SHOWN = 20

    def __init__(self, problems: Sequence[Problem], where: str = "", report: str = "") -> None:
        self.problems = tuple(problems)
        counts = Counter(problem.code for problem in self.problems)
        kinds = ", ".join(f"{n} x {code}" for code, n in sorted(counts.items()))
        super().__init__(
            "PROBLEMS",
            f"{len(self.problems)} problem(s) before the first step: {kinds}",
            where,
            'repair or remove what is named, or pass on_bad="skip" to go on without it'
            + (f"; full list: {report}" if report else ""),
        )
        self.report = report
        # unpickling calls the class with `args`
        self.args = (self.problems, where, report)

    def __str__(self) -> str:
        shown = [f"  {problem}" for problem in self.problems[: self._SHOWN]]
        rest = len(self.problems) - self._SHOWN
        return "\n".join(
            [super().__str__(), *shown, *([f"  ... and {rest} more"] if rest > 0 else [])]
        )
