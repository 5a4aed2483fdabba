"""Who goes to which part of a split: drawn by subject, stratified.

It is stratified on label, or on groups of equal size of the number to be told, and on sex, age
tercile and field strength where the cohort is large enough for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from .errors import SplitError
from .labels import Task
from .records import ScanRecord
from .report import first_scans
from .sources.ids import canonical_subject
from .splits import Split

_FRACTIONS = "--data.val_fraction and --data.test_fraction / --val and --test"


def make_split(
    records: Iterable[ScanRecord],
    val_fraction: float,
    test_fraction: float,
    seed: int,
    *,
    folds: int = 0,
    classes: Mapping[str, str] | None = None,
    leave_out: str = "",
) -> Split:
    """Split the subjects of the used records.

    Args:
        records: the manifest; for several tasks, those of all of them.
        val_fraction: share of the subjects for validation; not used with ``folds``.
        test_fraction: share of the subjects for testing; may be 0.
        seed: another one gives another split.
        folds: 0, or how many folds to make of all that are not in the test set.
        classes: each subject's class, which is balanced first (:func:`rarest_classes`); the label
            if not given.
        leave_out: ``cohort=OASIS`` or ``site=012``: the people of that cohort or site are the test
            set, and nobody else; a person with scans at several sites counts at the first one.

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
    first = {record.subject: record for record in first_scans(list(records))}
    subjects = sorted(first)
    smallest = min(f for f in (val_fraction, test_fraction, folds and 1 / folds) if f)
    kinds = classes or _kinds(list(first.values()), smallest)
    test: list[str] = []
    how = ""
    if leave_out:
        test = _left_out(leave_out, list(first.values()))
        subjects = sorted(set(subjects) - set(test))
        test_fraction = 0.0
    if test_fraction:
        subjects, test, how = _cut(subjects, test_fraction, first, kinds, seed)
    if folds:
        parts, how_folds = _fold(subjects, folds, first, kinds, seed + 1)
        split = Split((), (), tuple(sorted(test)), seed, 0.0, test_fraction, how or how_folds)
        return replace(split, folds=parts)
    train, val, how_val = _cut(subjects, val_fraction / (1 - test_fraction), first, kinds, seed + 1)
    return Split(
        train=tuple(sorted(train)),
        val=tuple(sorted(val)),
        test=tuple(sorted(test)),
        seed=seed,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        stratified_on=how or how_val,
    )


_GROUPS = 5  # of equal size, of a number


def _kinds(people: list[ScanRecord], fraction: float) -> dict[str, str]:
    """Each subject's label, or the group of equal size that a number is in, the lowest first.

    There are so many groups that a part of this share of the people can have two of each.
    """
    known = sorted((r.target, r.subject) for r in people if r.target is not None)
    if not known:
        return {record.subject: f"label {record.label}" for record in people}
    groups = max(1, min(_GROUPS, int(len(known) * fraction / 2)))
    return {
        subject: f"group {n * groups // len(known) + 1}" for n, (_, subject) in enumerate(known)
    }


GROUPINGS = ("cohort", "site")
"""What can be left out of the training as a whole."""


def _left_out(what: str, people: list[ScanRecord]) -> list[str]:
    """The people of a group that is held out as a whole."""
    by, _, wanted = what.partition("=")
    if by not in GROUPINGS or not wanted:
        raise SplitError(
            "BAD_GROUP",
            f"nothing can be left out by {what!r}",
            action="use cohort=NAME or site=NUMBER (--data.leave_out / --leave-out)",
        )
    groups = Counter(str(getattr(record, by)) for record in people)
    chosen = [record.subject for record in people if getattr(record, by) == wanted]
    if not chosen or len(chosen) == len(people):
        known = ", ".join(f"{name or 'not known'}: {n}" for name, n in sorted(groups.items()))
        raise SplitError(
            "BAD_GROUP",
            f"{'all' if chosen else 'none'} of {len(people)} people have {by} {wanted}",
            action=f"leave out one of those that are there: {known}",
        )
    return sorted(chosen)


def rarest_classes(surveys: Mapping[Task, Iterable[ScanRecord]]) -> dict[str, str]:
    """Each subject's class, and of the classes in several tasks the one with the fewest subjects.

    Who converts while being scanned is progressive MCI in one task and AD in another.
    """
    members: dict[str, set[str]] = defaultdict(set)
    for task, records in surveys.items():
        for record in records:
            if record.used and record.label is not None:
                members[task.class_names[record.label]].add(record.subject)
    found: dict[str, str] = {}
    for name in sorted(members, key=lambda name: (len(members[name]), name)):
        found = dict.fromkeys(members[name], name) | found
    return found


def extend_split(split: Split, records: Iterable[ScanRecord]) -> Split:
    """Add the subjects that are new, to training or to the smallest fold; nobody else moves.

    The held-out subjects stay who they were, so that results stay comparable.
    """
    known = {canonical_subject(s) for part in (*split.folds, *_parts(split)) for s in part}
    new = sorted({record.subject for record in records if record.used} - known)
    if not split.folds:
        return replace(split, train=tuple(sorted([*split.train, *new])))
    folds = [list(fold) for fold in split.folds]
    for subject in new:
        min(folds, key=len).append(subject)
    return replace(split, folds=tuple(tuple(sorted(fold)) for fold in folds))


def _parts(split: Split) -> tuple[tuple[str, ...], ...]:
    return split.train, split.val, split.test


def _cut(
    subjects: list[str],
    fraction: float,
    first: Mapping[str, ScanRecord],
    classes: Mapping[str, str],
    seed: int,
) -> tuple[list[str], list[str], str]:
    """(rest, part, what it was stratified on), with the finest stratification that is possible."""
    from sklearn.model_selection import train_test_split  # a second that only splitting needs

    size = round(fraction * len(subjects))
    for name, strata in _strata(subjects, first, classes).items():
        smallest, kinds = min(Counter(strata).values(), default=0), len(set(strata))
        if smallest >= 2 and kinds <= size <= len(subjects) - kinds:
            rest, part = train_test_split(
                subjects, test_size=size, stratify=strata, random_state=seed
            )
            return list(rest), list(part), name
    raise _too_few(f"put {size} of {len(subjects)} subjects aside", "part", subjects, classes)


def _fold(
    subjects: list[str],
    count: int,
    first: Mapping[str, ScanRecord],
    classes: Mapping[str, str],
    seed: int,
) -> tuple[tuple[tuple[str, ...], ...], str]:
    """(folds, what they were stratified on)."""
    from sklearn.model_selection import StratifiedKFold  # a second that only splitting needs

    if count < 2:
        raise SplitError("BAD_FRACTION", f"{count} folds", action="use 2 or more")
    for name, strata in _strata(subjects, first, classes).items():
        if min(Counter(strata).values(), default=0) >= count:
            cutter = StratifiedKFold(count, shuffle=True, random_state=seed)
            members = [held for _, held in cutter.split(subjects, strata)]
            return tuple(tuple(sorted(subjects[i] for i in held)) for held in members), name
    raise _too_few(f"make {count} folds of {len(subjects)} subjects", "fold", subjects, classes)


def _strata(
    subjects: list[str], first: Mapping[str, ScanRecord], classes: Mapping[str, str]
) -> dict[str, list[str]]:
    """The group of each subject, the finest grouping first."""
    labels = [classes[subject] for subject in subjects]
    sexes = [first[subject].sex for subject in subjects]
    fields = [str(first[subject].field_strength or "") for subject in subjects]
    ages = np.array([first[subject].age or 0.0 for subject in subjects])  # unknown: one stratum
    known = ages[ages > 0]
    terciles = np.digitize(ages, np.quantile(known, [1 / 3, 2 / 3]) if known.size else []).tolist()
    columns = [labels, sexes, terciles, fields]
    number = any(first[subject].target is not None for subject in subjects)
    names = ["number" if number else "label", "sex", "age", "field strength"]
    strata = {}
    for used in (4, 3, 2, 1):
        if used == 4 and len(set(fields)) < 2:
            continue  # known for nobody, or the same for all
        groups = ["|".join(map(str, values)) for values in zip(*columns[:used])]
        strata[", ".join(names[:used])] = groups
    return strata


def _too_few(what: str, part: str, subjects: list[str], classes: Mapping[str, str]) -> SplitError:
    found = Counter(classes[subject] for subject in subjects)
    counts = ", ".join(f"{n} of {name}" for name, n in sorted(found.items()))
    return SplitError(
        "TOO_FEW_SUBJECTS",
        f"cannot {what} with every class in every {part} ({counts or 'no subjects at all'})",
        action=f"use more subjects, or other fractions ({_FRACTIONS})",
    )
