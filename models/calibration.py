"""Do probabilities mean what they say: slope, intercept, and a curve of what was observed.

For two classes; label 1 is the positive one.
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logit

from models.intervals import FEWEST, Interval, wilson
from models.metrics import Array

_SURE = 1e-12  # no probability is taken for certain
_Z = 1.96
FEWEST_CALIBRATED = 30
"""People below which slope and intercept have no interval."""
BINS = 5
"""Groups of equally many scans in the curve."""


def slope_and_intercept(positive: Array, labels: Array) -> tuple[float, float]:
    """Calibration slope, and calibration in the large.

    The slope is that of a logistic regression of the label on the logit: below 1, probabilities are
    too extreme. The intercept is what the logits lack with a slope of 1: below 0, probabilities are
    too high. NaN where the classes do not overlap, or one is missing.

    Args:
        positive: (n,) probabilities of label 1.
        labels: (n,), 0 or 1.
    """
    logits = logit(np.clip(positive, _SURE, 1 - _SURE))
    if len(set(labels.tolist())) < 2:
        return float("nan"), float("nan")
    ours, theirs = logits[labels == 1], logits[labels == 0]
    signs = np.where(labels == 1, 1.0, -1.0)

    def loss(values: Array, fixed: float | None = None) -> float:
        scale = values[1] if fixed is None else fixed
        return float(-log_expit(signs * (values[0] + scale * logits)).mean())

    intercept = minimize(loss, [0.0], args=(1.0,), method="BFGS").x[0]
    if ours.min() >= theirs.max() or ours.max() <= theirs.min():  # the slope would be infinite
        return float("nan"), float(intercept)
    slope = minimize(loss, [0.0, 1.0], method="BFGS").x[1]
    return float(slope), float(intercept)


def calibration_intervals(positive: Array, labels: Array) -> dict[str, Interval]:
    """Of slope and intercept, from the likelihood's curvature; none of a slope that is infinite.

    Args:
        positive: (n,) probabilities of label 1, one for each person.
        labels: (n,), 0 or 1.
    """
    slope, intercept = slope_and_intercept(positive, labels)
    if len(labels) < FEWEST_CALIBRATED or np.isnan(intercept):
        return {}
    logits = logit(np.clip(positive, _SURE, 1 - _SURE))
    columns = np.stack([np.ones_like(logits), logits])

    def information(shift: float, scale: float) -> Array:
        called = expit(shift + scale * logits)
        return np.asarray((columns * called * (1 - called)) @ columns.T)

    half = _Z / np.sqrt(information(intercept, 1.0)[0, 0])
    found = {"intercept": (intercept - half, intercept + half)}
    if not np.isnan(slope):
        shift = slope_and_intercept(recalibrated(positive, slope, 0.0), labels)[1]
        half = _Z * np.sqrt(np.linalg.inv(information(shift, slope))[1, 1])
        found["slope"] = (slope - half, slope + half)
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def recalibrated(positive: Array, slope: float, intercept: float) -> Array:
    """Probabilities (n,) of which the logits are stretched and shifted."""
    logits = logit(np.clip(positive, _SURE, 1 - _SURE))
    return np.asarray(expit(intercept + slope * logits))


def observed(positive: Array, labels: Array) -> list[tuple[float, float, Interval | None, int]]:
    """(mean probability, share of label 1, its interval, scans) in groups of equal size."""
    order = np.argsort(positive, kind="stable")
    found = []
    for own in np.array_split(order, min(BINS, max(len(order) // FEWEST, 1))):
        share = float(labels[own].mean())
        bounds = wilson(share, len(own)) if len(own) >= FEWEST else None
        found.append((float(positive[own].mean()), share, bounds, len(own)))
    return found


def predictive_values(
    sensitivity: float, specificity: float, prevalence: float
) -> tuple[float, float]:
    """PPV and NPV where a share ``prevalence`` has the disease; NaN where nobody is called so."""
    true, false = sensitivity * prevalence, (1 - specificity) * (1 - prevalence)
    right, missed = specificity * (1 - prevalence), (1 - sensitivity) * prevalence
    ppv = true / (true + false) if true + false else float("nan")
    npv = right / (right + missed) if right + missed else float("nan")
    return ppv, npv
