"""What kind of input a set of scans is: raw, registered, or stripped of everything but the brain.

A network that is trained on a mixture learns the preparation instead of the disease, and intensity
cannot be scaled alike: what is 0 outside a stripped brain is noise around a raw head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from .errors import DataError, Problem
from .records import ScanRecord

Profile = Literal["raw", "registered", "stripped"]
_BRAIN_LITRES, _HEAD_LITRES = (
    2.5,
    2.8,
)  # the largest brains with their fluid; a head from the eyes up
_EMPTY, _NOISY = 0.4, 0.1  # shares of voxels that are 0


def is_stripped(values: np.ndarray[Any, Any], voxel_mm3: float) -> str:
    """``yes`` for a brain in nothing, ``no`` for a head; empty where it is neither clearly.

    Args:
        values: (X, Y, Z), the background at 0.
        voxel_mm3: size of a voxel.
    """
    inside = int((values > 0).sum())
    litres, empty = inside * voxel_mm3 * 1e-6, 1 - inside / values.size
    if empty >= _EMPTY and litres < _BRAIN_LITRES:
        return "yes"
    return "no" if litres >= _HEAD_LITRES or empty < _NOISY else ""


def refuse_mixture(
    records: Sequence[ScanRecord],
) -> tuple[list[ScanRecord], list[Problem]]:
    """The records, those of the rarer kind marked as bad, with a problem for each of them."""
    checked, problems = list(records), []
    for name, true, false in (
        ("registered", "registered", "not registered"),
        ("stripped", "without a skull", "with skull"),
    ):
        counts = Counter(getattr(record, name) for record in checked if record.used)
        if not counts["yes"] or not counts["no"]:
            continue
        fewer = min(("yes", "no"), key=lambda word: counts[word])
        what, others = (true, false) if fewer == "yes" else (false, true)
        for number, record in enumerate(checked):
            if record.used and getattr(record, name) == fewer:
                checked[number] = replace(record, problem="MIXED_INPUT")
                problems.append(
                    Problem(
                        "MIXED_INPUT",
                        f"the scan is {what}, like {counts[fewer]} in all, and "
                        f"{max(counts['yes'], counts['no'])} are {others}: a network would learn "
                        "the preparation",
                        "prepare all scans alike, or give each kind a folder of its own",
                        record.path,
                        record.subject,
                        record.image_id,
                    )
                )
    return checked, problems


def choose_profile(asked: Profile | Literal["auto"], records: Sequence[ScanRecord]) -> Profile:
    """The kind of the used scans.

    Raises:
        DataError: they are a mixture, or not what was asked for.
    """
    _, mixture = refuse_mixture(records)
    if mixture:
        first = mixture[0]
        raise DataError(first.code, first.detail, first.path, first.action)
    used = [record for record in records if record.used]
    stripped = any(record.stripped == "yes" for record in used)
    registered = any(record.registered == "yes" for record in used)
    found: Profile = "stripped" if stripped else "registered" if registered else "raw"
    if asked != "auto" and asked not in get_args(Profile):
        names = ", ".join(("auto", *get_args(Profile)))
        raise DataError("BAD_PROFILE", f"profile {asked!r}", action=f"use one of {names}")
    known = stripped or registered or any(record.stripped == "no" for record in used)
    if asked not in ("auto", found) and known:
        raise DataError(
            "OTHER_INPUT",
            f"profile {asked!r} was asked for, but the scans are {found}",
            used[0].path,
            f"use --data.profile {found} or auto, or other scans",
        )
    return found if asked == "auto" else asked
