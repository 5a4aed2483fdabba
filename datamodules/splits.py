"""Splits by subject, kept in a file.

A split is made once and then read: adding one subject would reshuffle everything. It is stratified
on label, and on sex and age tercile where the cohort is large enough for it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from .atomic import write_atomically
from .errors import SplitError
from .records import ScanRecord

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")
_FRACTIONS = "--data.val_fraction and --data.test_fraction / --val and --test"


@dataclass(frozen=True)
class Split:
    """Which subject is in which part, and how that was decided."""

    train: tuple[str, ...]
    val: tuple[str, ...]
    test: tuple[str, ...]
    seed: int
    val_fraction: float
    test_fraction: float
    stratified_on: str

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for name in SPLITS:
            for subject in getattr(self, name):
                if subject in seen:
                    raise SplitError(
                        "LEAK",
                        f"subject {subject} is in {seen[subject]} and in {name}",
                        action="make the split again from subjects, not from scans",
                    )
                seen[subject] = name

    @property
    def fingerprint(self) -> str:
        """Hash over the members; two runs with the same one used the same split."""
        members = json.dumps([sorted(getattr(self, name)) for name in SPLITS])
        return hashlib.sha256(members.encode()).hexdigest()

    def part_of(self) -> dict[str, SplitName]:
        """Subject to part."""
        return {subject: name for name in SPLITS for subject in getattr(self, name)}


def make_split(
    records: Iterable[ScanRecord], val_fraction: float, test_fraction: float, seed: int
) -> Split:
    """Split the subjects of the used records.

    Raises:
        SplitError: fractions that leave nothing to train on, or a class too small to be in every
            part.
    """
    if not (0 < val_fraction < 1 and 0 <= test_fraction < 1 and val_fraction + test_fraction < 1):
        raise SplitError(
            "BAD_FRACTION",
            f"{val_fraction} of the subjects for validation, {test_fraction} for testing",
            action=f"use fractions above 0 with a sum below 1, test may be 0 ({_FRACTIONS})",
        )
    first = _first_scans(records)
    subjects = sorted(first)
    test: list[str] = []
    how = ""
    if test_fraction:
        subjects, test, how = _cut(subjects, test_fraction, first, seed)
    train, val, how_val = _cut(subjects, val_fraction / (1 - test_fraction), first, seed + 1)
    return Split(
        train=tuple(sorted(train)),
        val=tuple(sorted(val)),
        test=tuple(sorted(test)),
        seed=seed,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        stratified_on=how or how_val,
    )


def _first_scans(records: Iterable[ScanRecord]) -> dict[str, ScanRecord]:
    first: dict[str, ScanRecord] = {}
    for record in sorted((r for r in records if r.used), key=lambda r: (r.acq_date, r.image_id)):
        first.setdefault(record.subject, record)
    return first


def _cut(
    subjects: list[str], fraction: float, first: dict[str, ScanRecord], seed: int
) -> tuple[list[str], list[str], str]:
    """(rest, part, what it was stratified on), with the finest stratification that is possible."""
    from sklearn.model_selection import train_test_split  # a second that only splitting needs

    size = round(fraction * len(subjects))
    labels = [str(first[subject].label) for subject in subjects]
    sexes = [first[subject].sex for subject in subjects]
    ages = np.array([first[subject].age or 0.0 for subject in subjects])  # unknown: one stratum
    known = ages[ages > 0]
    terciles = np.digitize(ages, np.quantile(known, [1 / 3, 2 / 3]) if known.size else []).tolist()
    candidates: dict[str, list[str]] = {
        "label, sex, age": [f"{a}|{b}|{c}" for a, b, c in zip(labels, sexes, terciles)],
        "label, sex": [f"{a}|{b}" for a, b in zip(labels, sexes)],
        "label": labels,
    }
    for name, strata in candidates.items():
        smallest, kinds = min(Counter(strata).values(), default=0), len(set(strata))
        if smallest >= 2 and kinds <= size <= len(subjects) - kinds:
            rest, part = train_test_split(
                subjects, test_size=size, stratify=strata, random_state=seed
            )
            return list(rest), list(part), name
    counts = ", ".join(f"{n} of label {label}" for label, n in sorted(Counter(labels).items()))
    raise SplitError(
        "TOO_FEW_SUBJECTS",
        f"cannot put {size} of {len(subjects)} subjects aside with every class in both parts "
        f"({counts or 'no subjects at all'})",
        action=f"use more subjects, or other fractions ({_FRACTIONS})",
    )


def assign(records: Sequence[ScanRecord], split: Split, where: str = "") -> list[ScanRecord]:
    """Write the part into every used record.

    Raises:
        SplitError: a subject is missing from the split, or two spellings of one are in two parts.
    """
    parts = split.part_of()
    missing = sorted({r.subject for r in records if r.used and r.subject not in parts})
    if missing:
        raise SplitError(
            "NOT_IN_SPLIT",
            f"{len(missing)} subject(s) are in the data and not in the split: "
            f"{', '.join(missing[:5])}",
            where,
            "give another --data.split_file (a new one is made when it does not exist)",
        )
    return [replace(r, split=parts[r.subject]) if r.used else r for r in records]


def check_leak(records: Sequence[ScanRecord]) -> None:
    """No subject and no file content in two parts.

    Raises:
        SplitError: with the subjects or images concerned. There is no option to go on.
    """
    _check_leak(records, "subject", "subject", "subject")
    _check_leak(records, "sha256", "image_id", "file content of image")


def _check_leak(records: Sequence[ScanRecord], key: str, name: str, what: str) -> None:
    groups: dict[str, list[ScanRecord]] = defaultdict(list)
    for record in records:
        if record.used and getattr(record, key):
            groups[getattr(record, key)].append(record)

    def those(group: list[ScanRecord], field: str) -> list[str]:
        return sorted({getattr(record, field) for record in group})

    torn = [group for group in groups.values() if len(those(group, "split")) > 1]
    if torn:
        found = "; ".join(
            f"{', '.join(those(group, name))} in {' and '.join(those(group, 'split'))}"
            for group in torn[:5]
        )
        raise SplitError(
            "LEAK", f"{what} in two parts: {found}", action="make the split again from subjects"
        )


def save_split(path: Path, split: Split) -> None:
    """Write a split file; one that holds another split is never overwritten.

    Raises:
        SplitError: the file holds another split, or something else.
    """
    if path.exists() and load_split(path) != split:
        raise SplitError(
            "SPLIT_EXISTS", "another split is there already", str(path), "give another --out"
        )
    write_atomically(path, (json.dumps(asdict(split), indent=1) + "\n").encode())


def load_split(path: Path) -> Split:
    """Read a split file.

    Raises:
        SplitError: missing, not a split, or a subject in two parts.
    """
    try:
        content = json.loads(path.read_text())
        return Split(**(content | {name: tuple(content[name]) for name in SPLITS}))
    except SplitError as error:
        raise SplitError(error.code, error.found, str(path), error.action) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SplitError(
            "BAD_SPLIT", f"not a split file ({error})", str(path), "remove it to make a new split"
        ) from None
