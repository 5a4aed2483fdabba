"""Scans that are not like the others of their cohort, named before anything is trained on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from .atomic import write_atomically
from .checks import FileReport, kept_reports
from .errors import Problem
from .likeness import Likeness, compare
from .nifti import Leniency
from .records import ScanRecord

Unlike = Literal["error", "use"]
ACTION = (
    "look at it in montage.png: wrong orientation, axes, voxel size, contrast, or no head? Correct "
    "or exclude it, or take such scans as they are: --data.unlike / --unlike use"
)


def name_unlike(
    records: Sequence[ScanRecord], store: Path, leniency: Leniency, unlike: Unlike
) -> tuple[list[ScanRecord], list[Problem]]:
    """The records with their likeness to the others, and a problem for each that has too little.

    Args:
        records: checked; those that are used are compared.
        store: of the check; what was compared once is kept beside it.
        leniency: with which they were checked.
        unlike: whether such a scan is bad, or used and warned of.
    """
    reports = kept_reports(store, leniency, [record.path for record in records if record.used])
    found = _compared(reports, store.with_name(f"{store.stem}-likeness.json"))
    if found is None:
        return list(records), []
    named, problems = [], []
    for record in records:
        value = found.values.get(record.path) if record.used else None
        record = replace(record, likeness=None if value is None else round(value, 3))
        if value is not None and value < found.bound:
            record = replace(record, problem="UNLIKE" if unlike == "error" else "")
            detail = f"no head like the others: {in_words(value, found.bound)}"
            who = (record.path, record.subject, record.image_id)
            problems.append(Problem("UNLIKE", detail, ACTION, *who))
        named.append(record)
    return named, problems


def in_words(value: float, bound: float) -> str:
    """How like the others, and how much it should be."""
    return f"correlation {value:.2f} with their mean, where {bound:.2f} is the least"


def usual(records: Sequence[ScanRecord], store: Path, leniency: Leniency) -> Likeness | None:
    """What scans have in common that were checked; None for too few."""
    reports = kept_reports(store, leniency, [record.path for record in records])
    return compare({path: report.coarse for path, report in reports.items()})


def _compared(reports: Mapping[str, FileReport], kept: Path) -> Likeness | None:
    scans = {path: report.coarse for path, report in sorted(reports.items())}
    key = hashlib.sha256(json.dumps(scans).encode()).hexdigest()
    try:
        content = json.loads(kept.read_text())
        if content["of"] == key:
            return Likeness(content["values"], content["bound"], np.array(content["mean"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or damaged: compared again
    found = compare(scans)
    if found is not None:
        content = {"of": key, "values": found.values, "bound": found.bound}
        content |= {"mean": found.mean.round(4).tolist()}
        write_atomically(kept, json.dumps(content).encode())
    return found
