"""Splits by subject, kept in a file.

A split is made once and then read: drawing it again with one subject more would reshuffle
everything. One split may serve several tasks, which weights that go from one to the other need: who
is held out in one of them is not trained on in another.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .atomic import write_atomically
from .errors import DataError, SplitError
from .progression import LabelRule
from .records import ScanRecord
from .sources.ids import canonical_subject

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Split:
    """Which subject is in which part, and how that was decided.

    With ``folds`` the subjects that are not in the test set stand there, and ``of_fold`` tells who
    of them trains and who validates; without a test set, also who tests.

    Attributes:
        train: IDs of the subjects.
        val: likewise.
        test: likewise.
        seed: of the drawing.
        val_fraction: share of the subjects that was asked for validation; 0 with folds.
        test_fraction: share of the subjects that was asked for testing.
        stratified_on: what is balanced between the parts.
        folds: IDs of the subjects of each fold; empty: there are none.
        task: names of the tasks it was made for, joined by ``+``; empty: not known.
        rule: fields of the ``LabelRule`` of the labels, by name; empty: not known.
    """

    train: tuple[str, ...]
    val: tuple[str, ...]
    test: tuple[str, ...]
    seed: int
    val_fraction: float
    test_fraction: float
    stratified_on: str
    folds: tuple[tuple[str, ...], ...] = ()
    task: str = ""
    rule: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts: dict[str, tuple[str, ...]] = {name: getattr(self, name) for name in SPLITS}
        _refuse_twice(parts)
        folds = {f"fold {n}": fold for n, fold in enumerate(self.folds)}
        # one of the folds may be the test set of today
        _refuse_twice(folds if self.test in self.folds else {"test": self.test} | folds)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks it was made for; none if that is not known."""
        return tuple(self.task.split("+")) if self.task else ()

    @property
    def fingerprint(self) -> str:
        """Hash over the members; two runs with the same one used the same split."""
        members = json.dumps([sorted(getattr(self, name)) for name in SPLITS])
        return hashlib.sha256(members.encode()).hexdigest()

    def of_fold(self, fold: int) -> Split:
        """The split that validates on one fold and trains on the others.

        Where nobody is held out from all folds, the fold tests, the next one validates and the
        others train: everybody is then tested on once, by a network of which the epoch was chosen
        on other people.

        Raises:
            SplitError: no such fold, or too few to test, validate and train.
        """
        if not 0 <= fold < len(self.folds):
            raise SplitError(
                "NO_FOLD",
                f"fold {fold} of a split with {len(self.folds)} folds",
                action="count folds from 0, or make a split with more (--data.folds / --folds)",
            )
        if self.test:
            val, test = fold, self.test
        elif len(self.folds) > 2:
            val, test = (fold + 1) % len(self.folds), self.folds[fold]
        else:
            raise SplitError(
                "NO_FOLD",
                f"{len(self.folds)} folds cannot test, validate and train",
                action="use 3 folds or more, or hold people out of all (--data.test_fraction)",
            )
        held = {*self.folds[val], *test}
        train = tuple(sorted(s for other in self.folds for s in other if s not in held))
        return replace(self, train=train, val=self.folds[val], test=test)

    def part_of(self) -> dict[str, SplitName]:
        """Subject to part."""
        return {canonical_subject(s): name for name in SPLITS for s in getattr(self, name)}

    def fold_of(self) -> dict[str, int]:
        """Subject to fold, for those that are in one."""
        return {canonical_subject(s): n for n, fold in enumerate(self.folds) for s in fold}


def _refuse_twice(parts: Mapping[str, Sequence[str]]) -> None:
    """Raise for a subject in two parts, whatever the spelling."""
    seen: dict[str, str] = {}
    for name, members in parts.items():
        for subject in map(canonical_subject, members):
            if subject in seen:
                raise SplitError(
                    "LEAK",
                    f"subject {subject} is in {seen[subject]} and in {name}",
                    action="make the split again from subjects, not from scans",
                )
            seen[subject] = name


def assign(records: Sequence[ScanRecord], split: Split, where: str = "") -> list[ScanRecord]:
    """Write the part into every used record.

    Raises:
        SplitError: a subject is missing from the split, or two spellings of one are in two parts.
    """
    parts, folds = split.part_of(), split.fold_of()
    missing = sorted({r.subject for r in records if r.used and r.subject not in parts})
    if missing:
        raise SplitError(
            "NOT_IN_SPLIT",
            f"{len(missing)} subject(s) are in the data and not in the split: "
            f"{', '.join(missing[:5])}",
            where,
            "add them to the training part with `python -m datamodules split ROOT --extend OLD "
            "--out NEW` and give NEW with --data.split_file, or give a file that does not exist: "
            "a new split is made then",
        )
    return [
        replace(r, split=parts[r.subject], fold=folds.get(r.subject)) if r.used else r
        for r in records
    ]


def check_leak(records: Sequence[ScanRecord]) -> None:
    """No subject and no file content in two parts.

    Raises:
        SplitError: with the subjects or images concerned. There is no option to go on.
    """
    _check_leak(records, "subject", "subject", "subject")
    _check_leak(records, "sha256", "image_id", "file content of image")
    _check_leak(records, "content", "image_id", "picture of image")


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
        parts = {name: tuple(content[name]) for name in SPLITS}
        folds = tuple(tuple(fold) for fold in content.get("folds", ()))
        return Split(**(content | parts | {"folds": folds}))
    except SplitError as error:
        raise SplitError(error.code, error.found, str(path), error.action) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SplitError(
            "BAD_SPLIT", f"not a split file ({error})", str(path), "remove it to make a new split"
        ) from None


def chosen_fold(split: Split, fold: int, task: str, rule: LabelRule, path: Path) -> Split:
    """One fold of a split, if that was made for these labels.

    Raises:
        SplitError: it was made for another task or label rule, or has no such fold.
    """
    mine = {"task": split.task if task in split.tasks else task, **asdict(rule)}
    its = {"task": split.task, **asdict(LabelRule()), **split.rule}
    differ = [f"{k} {its[k]!r} there, {mine[k]!r} here" for k in its if its[k] != mine.get(k)]
    if differ and split.task:
        raise SplitError(
            "OTHER_RULE",
            f"the split was made for other labels: {'; '.join(differ)}",
            str(path),
            "use the same options, or a new --data.split_file; one split for several tasks is "
            "made by `python -m datamodules split ROOT --task ONE --task OTHER`",
        )
    try:
        return split.of_fold(fold) if split.folds or fold else split
    except SplitError as error:
        raise SplitError(error.code, error.found, str(path), error.action) from None


def check_classes(records: Iterable[ScanRecord], names: Sequence[str], root: Path) -> None:
    """Refuse to train without a scan of some class.

    Raises:
        SplitError: names the classes.
    """
    present = {record.label for record in records if record.split == "train"}
    missing = [name for label, name in enumerate(names) if label not in present]
    if missing:
        raise SplitError(
            "MISSING_CLASS",
            f"no training scan of {', '.join(missing)}",
            str(root),
            "add scans of that class, or use another split",
        )


def permuted(records: Sequence[ScanRecord], seed: int) -> list[ScanRecord]:
    """Labels permuted over the subjects of each part, so that the class counts stay."""
    labels: dict[str, tuple[int | None, float | None]] = {}
    for number, part in enumerate(SPLITS):
        own = {r.subject: (r.label, r.target) for r in records if r.split == part}
        subjects = sorted(own)
        order = np.random.default_rng([seed, number]).permutation(len(subjects))
        labels |= {subject: own[subjects[other]] for subject, other in zip(subjects, order)}
    return [
        replace(r, label=labels[r.subject][0], target=labels[r.subject][1]) if r.split else r
        for r in records
    ]


def check_same(
    state: Mapping[str, Any], mine: Mapping[str, Any], split_file: Path, root: Path
) -> None:
    """That a checkpoint was trained on today's split, and on images prepared as today.

    Args:
        state: the data module's in the checkpoint; what it does not have is not compared.
        mine: today's.
        split_file: of today's split.
        root: folder of the scans.

    Raises:
        SplitError: today's held-out subjects may have been trained on.
        DataError: another preprocessing.
    """
    if state.get("split") not in (None, mine["split"]):
        raise SplitError(
            "OTHER_SPLIT",
            "the checkpoint was trained on another split of the subjects",
            str(split_file),
            "give the split of that run with --data.split_file, or start anew",
        )
    check_same_images(state, mine["preprocessing"], root)


def check_same_images(state: Mapping[str, Any], own: Mapping[str, Any], root: Path) -> None:
    """That a checkpoint was trained on images prepared as today.

    Args:
        state: the data module's in the checkpoint; what it does not have is not compared.
        own: today's preprocessing.
        root: folder of the scans.

    Raises:
        DataError: another preprocessing.
    """
    its = state.get("preprocessing") or {}
    differ = [f"{k} {its[k]} there, {own.get(k)} here" for k in its if its[k] != own.get(k)]
    if differ:
        raise DataError(
            "OTHER_PREPROCESSING",
            f"the checkpoint was trained on images prepared otherwise: {'; '.join(differ)}",
            str(root),
            "use the settings of that run: --config RUN/config.yaml",
        )
