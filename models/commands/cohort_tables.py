"""Tables of an external validation: beside the internal test, by groups, calibration, and shift."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from datamodules.records import ScanRecord
from models.calibration import calibration_intervals, recalibrated, slope_and_intercept
from models.metrics import Array
from models.reference import Reference
from models.scores import evaluate, intervals
from models.tasks import is_number


def beside_internal(
    external: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    internal: Mapping[str, float],
) -> list[dict[str, Any]]:
    """One row a metric: on the run's own test set, and on the cohort, with intervals."""
    rows = []
    for name, value in external.items():
        low, high = bounds.get(name, ("", ""))
        rows.append(
            {
                "metric": name,
                "internal": internal.get(name, ""),
                "internal_low": internal.get(f"{name}_low", ""),
                "internal_high": internal.get(f"{name}_high", ""),
                "external": value,
                "external_low": low,
                "external_high": high,
            }
        )
    return rows


_RECALIBRATED = 24  # scans: twelve to fit, twelve to judge
_GROUPS: dict[str, Callable[[ScanRecord], str]] = {
    "site": lambda r: r.site,
    "sex": lambda r: r.sex,
    "age": lambda r: (
        "" if r.age is None else f"{10 * int(r.age // 10)} to {10 * int(r.age // 10) + 9}"
    ),
    "field strength": lambda r: "" if r.field_strength is None else f"{r.field_strength:g} T",
    "scanner": lambda r: r.scanner or "unknown",
    "phase": lambda r: r.phase,
}


_OF_CLASSES = ("accuracy", "auroc", "sensitivity", "specificity")
_OF_NUMBER = ("mae", "bias", "pearson_r")
_CORRELATED = 10  # scans: of two or three the correlation may be anything


def at_threshold(
    positive: Array, labels: Array, people: Sequence[str], threshold: float
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Sensitivity and specificity at the threshold that validation scans gave, and intervals."""
    called = np.eye(2)[(positive > threshold).astype(int)]
    values, bounds = evaluate(called, labels), intervals(called, labels, people)
    names = ("sensitivity", "specificity")
    return (
        {"threshold": threshold} | {f"{name}_at_threshold": values[name] for name in names},
        {f"{name}_at_threshold": bounds[name] for name in names if name in bounds},
    )


def by_group(
    records: Sequence[ScanRecord], outputs: Array, labels: Array, class_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Metrics of every group of a kind; intervals where there are enough people for one."""
    rows, number = [], is_number(class_names)
    shown = _OF_NUMBER if number else _OF_CLASSES
    for kind, of in _GROUPS.items():
        groups = [of(record) for record in records]
        for group in sorted(set(groups) - {""}):
            own = np.array([name == group for name in groups])
            people = [r.subject for r, mine in zip(records, own) if mine]
            values = evaluate(outputs[own], labels[own])
            bounds = intervals(outputs[own], labels[own], people)
            row: dict[str, Any] = {"by": kind, "group": group, "scans": int(own.sum())}
            if not number:
                row["of_last_class"] = int((labels[own] == outputs.shape[1] - 1).sum())
            for name in shown:
                value = values[name]
                chance = name == "pearson_r" and own.sum() < _CORRELATED
                row[name] = "" if chance or math.isnan(value) else value
                row[f"{name}_low"], row[f"{name}_high"] = bounds.get(name, ("", ""))
            rows.append(row)
    return rows


def calibration_rows(
    raw: Array, calibrated: Array, labels: Array, people: Sequence[str]
) -> list[dict[str, Any]]:
    """Slope and intercept of the network, after its temperature, and after a fit to this cohort.

    The last one is cross-fitted (each half of the people with the numbers of the other), or it
    would be perfect by construction; it says what recalibration on site could reach. Slope and
    intercept are there with their intervals alone: of a few people they may be anything.
    """
    shown = {"network": raw, "temperature of the validation scans": calibrated}
    halves = np.unique(people, return_inverse=True)[1] % 2
    fits = [slope_and_intercept(raw[halves != half], labels[halves != half]) for half in (0, 1)]
    slopes, how = [slope for slope, _ in fits], ""
    if np.isnan(slopes).any():  # the classes of a half do not overlap, and small cohorts' often
        slopes, how = [1.0, 1.0], ", intercept alone"
    shifts = [_shifted(raw, labels, halves, h, slope) for h, slope in enumerate(slopes)]
    if not np.isnan(shifts).any() and len(labels) >= _RECALIBRATED:
        both = [recalibrated(raw, slope, shift) for slope, shift in zip(slopes, shifts)]
        name = f"recalibrated on this cohort{how}, cross-fitted"
        shown[name] = np.where(halves == 0, both[0], both[1])
    rows = []
    for name, values in shown.items():
        slope, intercept = slope_and_intercept(values, labels)
        alone = len(set(people)) == len(people)  # several scans of a person are nearly one
        bounds = calibration_intervals(values, labels) if alone else {}
        row: dict[str, Any] = {"probabilities": name}
        for column, value in (("slope", slope), ("intercept", intercept)):
            row[column] = value if column in bounds else ""
            row[f"{column}_low"], row[f"{column}_high"] = bounds.get(column, ("", ""))
        rows.append(row | {"brier": float(((values - labels) ** 2).mean())})
    known = {name for row in rows for name, value in row.items() if value != ""}
    return [{name: value for name, value in row.items() if name in known} for row in rows]


def _shifted(raw: Array, labels: Array, halves: Array, half: int, slope: float) -> float:
    """The intercept that goes with a slope, from the other half."""
    other = halves != half
    return slope_and_intercept(recalibrated(raw[other], slope, 0.0), labels[other])[1]


def shift_rows(
    reference: Reference,
    records: Sequence[ScanRecord],
    features: torch.Tensor,
    levels: Sequence[Mapping[str, float]],
) -> list[dict[str, Any]]:
    """How far the cohort's scans lie from those that were trained on."""
    columns: dict[str, list[float]] = {
        "age": [record.age for record in records if record.age is not None],
        "voxel_mm": [float(size) for record in records for size in record.zooms.split()],
    }
    columns |= {name: [values[name] for values in levels] for name in levels[0]}
    rows = []
    for name, values in columns.items():
        if not values or name not in reference.ranges:
            continue
        low, high = reference.ranges[name]
        outside = float(np.mean([not low <= value <= high for value in values]))
        low, high = reference.extremes.get(name, (low, high))
        rows.append(
            {
                "input": name,
                "trained_from": low,
                "trained_to": high,
                "here_mean": float(np.mean(values)),
                "here_from": min(values),
                "here_to": max(values),
                "outside": outside,
            }
        )
    far = [reference.distance(seen) for seen in features]
    row = {"input": "features (distance)", "trained_from": 0.0, "trained_to": reference.limit}
    row |= {"here_mean": float(np.mean(far)), "here_from": min(far), "here_to": max(far)}
    rows.append(row | {"outside": float(np.mean([value > reference.limit for value in far]))})
    return rows
