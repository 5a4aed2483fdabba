"""How well probabilities fit labels, and how sure one can be of it.

Shapes: ``probabilities`` (n, K), rows that sum to 1; ``labels`` (n,), 0 to K - 1. With two classes
label 1 is the positive one; with more, sensitivity, specificity, F1 and AUROC are means over the
classes, each against the others. A value that the data leave undefined is NaN.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Array = npt.NDArray[Any]

BINS = 10
"""Bins of confidence for the calibration error."""
LEVEL = 0.95
"""Coverage of an interval."""


def evaluate(probabilities: Array, labels: Array) -> dict[str, float]:
    """All metrics, fractions except ``mcc`` (-1 to 1)."""
    counts = confusion(probabilities, labels)
    true = np.diag(counts)
    positive = counts.sum(axis=1)
    called = counts.sum(axis=0)
    total = counts.sum()
    recall = _ratio(true, positive)
    shown = slice(1, None) if len(counts) == 2 else slice(None)
    specificity = _ratio(total - positive - called + true, total - positive)
    return {
        "accuracy": float(_ratio(true.sum(), total)),
        "balanced_accuracy": float(recall.mean()),
        "auroc": _auroc(probabilities, labels),
        "sensitivity": float(recall[shown].mean()),
        "specificity": float(specificity[shown].mean()),
        "f1": float(_ratio(2 * true, positive + called)[shown].mean()),
        "mcc": _mcc(true, positive, called, total),
        "brier": brier(probabilities, labels),
        "calibration_error": calibration_error(probabilities, labels),
    }


def confusion(probabilities: Array, labels: Array) -> Array:
    """Counts (K, K): rows are the labels, columns the classes of highest probability."""
    classes = probabilities.shape[1]
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (labels, probabilities.argmax(axis=1)), 1)
    return counts


def brier(probabilities: Array, labels: Array) -> float:
    """Mean squared distance of the probabilities from what was the case; 0.25 says nothing.

    Of the positive class for two classes, the sum over the classes for more.
    """
    if not len(labels):
        return float("nan")
    squares = (probabilities - np.eye(probabilities.shape[1])[labels]) ** 2
    own = squares[:, 1] if squares.shape[1] == 2 else squares.sum(axis=1)
    return float(own.mean())


def never_named(probabilities: Array, class_names: Sequence[str]) -> str:
    """A sentence about classes that are never the likeliest one; empty where there are none."""
    called = set(probabilities.argmax(axis=1).tolist())
    gone = [name for k, name in enumerate(class_names) if k not in called]
    if not gone or not called:
        return ""
    scans = f"{len(probabilities)} scans"
    return f"The network says {' and '.join(gone)} of none of {scans}: it has not learnt to."


def mcc(probabilities: Array, labels: Array) -> float:
    """Matthews' correlation of label and predicted class, -1 to 1."""
    counts = confusion(probabilities, labels)
    return _mcc(np.diag(counts), counts.sum(axis=1), counts.sum(axis=0), counts.sum())


def calibration_curve(probabilities: Array, labels: Array) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, scans) of each bin of confidence that is not empty."""
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    return [
        (float(confidence[own].mean()), float(right[own].mean()), int(own.sum()))
        for own in (bins == number for number in range(BINS))
        if own.any()
    ]


def calibration_error(probabilities: Array, labels: Array) -> float:
    """Expected calibration error: the mean distance of confidence and accuracy over the scans."""
    curve = calibration_curve(probabilities, labels)
    scans = sum(count for _, _, count in curve)
    gaps = sum(abs(confidence - right) * count for confidence, right, count in curve)
    return gaps / scans if scans else float("nan")


def roc(scores: Array, positive: Array) -> tuple[Array, Array]:
    """False and true positive rate at each threshold, from (0, 0) to (1, 1).

    Args:
        scores: (n,), higher for the positive class.
        positive: (n,), true for the positive class.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order])
    misses = np.cumsum(~positive[order])
    # equal scores are one threshold
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    return (
        np.append(0.0, _ratio(misses[last], misses[-1])),
        np.append(0.0, _ratio(hits[last], hits[-1])),
    )


def _auroc(probabilities: Array, labels: Array) -> float:
    classes = probabilities.shape[1]
    shown = (1,) if classes == 2 else range(classes)
    return float(np.mean([_auroc_of(probabilities[:, k], labels == k) for k in shown]))


def _auroc_of(scores: Array, positive: Array) -> float:
    """The share of pairs (positive, negative) in the right order; ties count half."""
    hits = int(positive.sum())
    misses = len(positive) - hits
    if not hits or not misses:
        return float("nan")
    ranks = rankdata(scores)[positive].sum()
    return float((ranks - hits * (hits + 1) / 2) / (hits * misses))


def _mcc(true: Array, positive: Array, called: Array, total: int) -> float:
    """Matthews' correlation, for any number of classes (Gorodkin 2004); 0 if one class is void."""
    n = float(total)
    covariance = true.sum() * n - (positive * called).sum()
    spread = (n**2 - (positive.astype(float) ** 2).sum()) * (
        n**2 - (called.astype(float) ** 2).sum()
    )
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def _ratio(part: Any, whole: Any) -> Array:
    part, whole = np.broadcast_arrays(np.asarray(part, dtype=float), whole)
    out = np.full(whole.shape, np.nan)
    np.divide(part, whole, out=out, where=whole != 0)
    return out
