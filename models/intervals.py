"""95 % intervals of metrics, each only where it covers 95 %, give or take two points.

* Shares (accuracy, sensitivity, specificity): Wilson's score interval.
* Balanced accuracy: the intervals of its recalls, combined (MOVER, Zou and Donner 2008).
* AUROC: the areas from which the one found is 1.96 standard errors away. The error is Hanley and
  McNeil's at that area (Newcombe's method 5, 2006), scaled by what DeLong's variance says of these
  scores, as far as there are people to tell.
* Brier score and Matthews' correlation: bootstrap with bias correction and acceleration (BCa).

F1 and the calibration error have none that holds. Two scans of a person are nearly one: wherever
people have several, the number of people counts, not that of scans. What is given from how many
people on is decided by ``benchmarks/interval_coverage.py``, which simulates all of them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import bootstrap, norm

from models.metrics import LEVEL, Array, brier, mcc

Interval = tuple[float, float]

FEWEST = 8
"""People below which a share has no interval: of fewer, Wilson's is off by more than that."""
FEWEST_OF_RECALL = 15
"""Likewise of each of two classes, for the mean of their recalls; of three it is twice as many."""
FEWEST_OF_CLASS, LOPSIDED = 7, 1.25
"""Of the AUROC: people of the smaller class, and how many times as many of the larger one. Where
one class is rare, its few worst scores decide, and no interval was found that holds."""
PRIOR = 25
"""People of the smaller class at which DeLong's variance counts as much as Hanley and McNeil's."""
FEWEST_BCA = 120
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
    bounds = [
        _share(hits, names[labels == k]) if people[k] >= FEWEST else None
        for k, hits in enumerate(recalls)
    ]
    if min(people) >= FEWEST_OF_RECALL * (classes - 1):
        shares = [float(hits.mean()) for hits in recalls]
        found["balanced_accuracy"] = mean_of(shares, [ends for ends in bounds if ends])
        if classes > 2:
            found["sensitivity"] = found["balanced_accuracy"]
    if classes == 2:
        named = zip(("specificity", "sensitivity"), bounds)
        found |= {name: ends for name, ends in named if ends is not None}
    if classes == 2 and (ends := auroc_interval(probabilities[:, 1], labels == 1, names)):
        found["auroc"] = ends
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


def mean_of(shares: Sequence[float], bounds: Sequence[Interval]) -> Interval:
    """Of the mean of independent shares, from theirs."""
    mean, parts = float(np.mean(shares)), len(shares)
    below = np.sqrt(sum((s - low) ** 2 for s, (low, _) in zip(shares, bounds))) / parts
    above = np.sqrt(sum((high - s) ** 2 for s, (_, high) in zip(shares, bounds))) / parts
    return float(mean - below), float(mean + above)


def auroc_interval(scores: Array, positive: Array, names: Array) -> Interval | None:
    """Of the area under the ROC curve; None where there are too few people to say.

    Args:
        scores: (n,), higher for the positive class.
        positive: (n,), true for the positive class.
        names: (n,), whose scan each is.
    """
    people = len(set(names[positive])), len(set(names[~positive]))
    if min(people) < FEWEST_OF_CLASS or max(people) > LOPSIDED * min(people):
        return None
    area, *parts = placements(scores, positive)
    scale = 1.0
    if 0 < area < 1:
        own = (names[positive], names[~positive])
        means = [_by_person(values, who) for values, who in zip(parts, own)]
        delong = sum(float(values.var(ddof=1)) / len(values) for values in means)
        weight = min(people) / (min(people) + PRIOR)
        scale = 1 - weight + weight * delong / _error(area, *people) ** 2
    return _score_interval(area, people, scale)


def _by_person(values: Array, names: Array) -> Array:
    """The mean of each person's values."""
    _, person = np.unique(names, return_inverse=True)
    return np.bincount(person, values) / np.bincount(person)


def _error(area: float, hits: int, misses: int) -> float:
    """Standard error of an area found with so many positives and negatives, where it is true."""
    spread = (1 - area) / (2 - area) + area / (1 + area)
    variance = area * (1 - area) * (1 + ((hits + misses) / 2 - 1) * spread) / (hits * misses)
    return float(np.sqrt(variance))


def placements(scores: Array, positive: Array) -> tuple[float, Array, Array]:
    """The area, and for each positive and each negative the share of others it is right about."""
    ours, theirs = scores[positive][:, None], scores[~positive][None]
    order = (ours > theirs) + 0.5 * (ours == theirs)
    return float(order.mean()), order.mean(axis=1), order.mean(axis=0)


def _score_interval(area: float, people: tuple[int, int], scale: float) -> Interval:
    """Where the area lies within 1.96 of the errors that it would have there, scaled."""

    def end(sign: int) -> float:
        def gap(true: float) -> float:
            return area - true - sign * _Z * float(np.sqrt(scale)) * _error(true, *people)

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
