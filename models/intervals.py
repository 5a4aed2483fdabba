"""95 % intervals of metrics, each by a method that holds 95 % also for few people.

* Shares (accuracy, sensitivity, specificity): Wilson's score interval.
* Balanced accuracy: the intervals of its recalls, combined (MOVER, Zou and Donner 2008).
* AUROC: DeLong's variance on the logit scale from 60 people on (DeLong et al. 1988), Newcombe's
  score interval (2006, his method 5) below, where DeLong's is undefined or too wide.
* Brier score and Matthews' correlation: bootstrap with bias correction and acceleration (BCa), from
  120 people on; below it falls short of 95 %.

F1 and the calibration error have none that holds. Two scans of a person are nearly one: wherever
people have several, the number of people counts, not that of scans. ``tests/models/test_intervals``
simulates the coverage.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import bootstrap, norm

from models.metrics import LEVEL, Array, brier, mcc

Interval = tuple[float, float]

FEWEST = 6
"""People below which no interval is given."""
FEWEST_DELONG, FEWEST_BCA = 60, 120
DRAWS = 1000
"""Bootstrap samples."""
_Z = float(norm.ppf((1 + LEVEL) / 2))


def intervals(
    probabilities: Array, labels: Array, subjects: Sequence[str], seed: int = 0
) -> dict[str, Interval]:
    """Intervals (low, high) of the metrics that have one with so many people.

    Args:
        probabilities: (n, K), rows that sum to 1.
        labels: (n,), 0 to K - 1.
        subjects: whose scan each row is.
        seed: of the bootstrap.
    """
    names = np.asarray(subjects)
    if len(set(subjects)) < FEWEST:
        return {}
    right = probabilities.argmax(axis=1) == labels
    found = {"accuracy": _share(right, names)}
    classes = probabilities.shape[1]
    recalls = [right[labels == k] for k in range(classes)]
    people = [len(set(names[labels == k])) for k in range(classes)]
    if min(people) >= 1:
        bounds = [_share(hits, names[labels == k]) for k, hits in enumerate(recalls)]
        shares = [float(hits.mean()) for hits in recalls]
        found["balanced_accuracy"] = _mean_of(shares, bounds)
        if classes == 2:
            found |= {"specificity": bounds[0], "sensitivity": bounds[1]}
        else:
            found["sensitivity"] = found["balanced_accuracy"]
    if classes == 2 and min(people) >= 3:
        found["auroc"] = auroc_interval(probabilities[:, 1], labels == 1, names)
    if len(set(subjects)) >= FEWEST_BCA:
        for name, metric in (("brier", brier), ("mcc", mcc)):
            found[name] = _bootstrapped(metric, probabilities, labels, names, seed)
    return {name: pair for name, pair in found.items() if not np.isnan(pair).any()}


def wilson(share: float, number: float) -> Interval:
    """Wilson's score interval of a share of ``number`` people."""
    middle = (share + _Z**2 / (2 * number)) / (1 + _Z**2 / number)
    half = _Z * np.sqrt(share * (1 - share) / number + _Z**2 / (4 * number**2))
    half /= 1 + _Z**2 / number
    return float(max(middle - half, 0)), float(min(middle + half, 1))


def _share(hits: Array, names: Array) -> Interval:
    return wilson(float(hits.mean()), len(set(names)))


def _mean_of(shares: Sequence[float], bounds: Sequence[Interval]) -> Interval:
    """Of the mean of independent shares, from theirs."""
    mean, parts = float(np.mean(shares)), len(shares)
    below = np.sqrt(sum((s - low) ** 2 for s, (low, _) in zip(shares, bounds))) / parts
    above = np.sqrt(sum((high - s) ** 2 for s, (_, high) in zip(shares, bounds))) / parts
    return float(mean - below), float(mean + above)


def auroc_interval(scores: Array, positive: Array, names: Array) -> Interval:
    """Of the area under the ROC curve.

    Args:
        scores: (n,), higher for the positive class.
        positive: (n,), true for the positive class.
        names: (n,), whose scan each is.
    """
    people = len(set(names[positive])), len(set(names[~positive]))
    area, hits, misses = placements(scores, positive)
    once = len(set(names)) == len(names)
    if once and min(people) >= 2 and sum(people) >= FEWEST_DELONG and 0 < area < 1:
        variance = hits.var(ddof=1) / len(hits) + misses.var(ddof=1) / len(misses)
        if variance > 0:
            away = _Z * np.sqrt(variance) / (area * (1 - area))
            middle = np.log(area / (1 - area))
            return tuple(float(1 / (1 + np.exp(-x))) for x in (middle - away, middle + away))  # type: ignore[return-value]
    return _newcombe(area, *people)


def placements(scores: Array, positive: Array) -> tuple[float, Array, Array]:
    """The area, and for each positive and each negative the share of others it is right about."""
    ours, theirs = scores[positive][:, None], scores[~positive][None]
    order = (ours > theirs) + 0.5 * (ours == theirs)
    return float(order.mean()), order.mean(axis=1), order.mean(axis=0)


def _newcombe(area: float, hits: int, misses: int) -> Interval:
    """Where the area lies within 1.96 of the errors that it would have there."""
    mean = (hits + misses) / 2

    def error(true: float) -> float:
        spread = (1 - true) / (2 - true) + true / (1 + true)
        return float(np.sqrt(true * (1 - true) * (1 + (mean - 1) * spread) / (hits * misses)))

    def end(sign: int) -> float:
        def gap(true: float) -> float:
            return area - true - sign * _Z * error(true)

        tiny = 1e-9
        low, high = (tiny, min(area, 1 - tiny)) if sign > 0 else (max(area, tiny), 1 - tiny)
        if low >= high or gap(low) * gap(high) > 0:
            return 0.0 if sign > 0 else 1.0
        return float(brentq(gap, low, high))

    return end(1), end(-1)


def _bootstrapped(
    metric: Callable[[Array, Array], float],
    probabilities: Array,
    labels: Array,
    names: Array,
    seed: int,
) -> Interval:
    _, group = np.unique(names, return_inverse=True)
    members = [np.flatnonzero(group == number) for number in range(group.max() + 1)]

    def value(chosen: Array) -> float:
        rows = np.concatenate([members[number] for number in chosen])
        return metric(probabilities[rows], labels[rows])

    return bca(value, len(members), seed)


def bca(value: Callable[[Array], float], people: int, seed: int = 0) -> Interval:
    """BCa interval of a number that is computed from people, by their positions."""
    found = bootstrap(
        (np.arange(people),),
        value,
        vectorized=False,
        n_resamples=DRAWS,
        confidence_level=LEVEL,
        method="BCa",
        rng=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
