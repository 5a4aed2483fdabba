"""Metrics and intervals of what a task gives: classes (`metrics`, `intervals`), or a number.

Shapes: ``outputs`` (n, K), probabilities of K classes, or (n, 1), numbers; ``labels`` (n,).
"""

from collections.abc import Sequence

from models import intervals as of_classes
from models import metrics, numbers
from models.metrics import Array


def evaluate(outputs: Array, labels: Array) -> dict[str, float]:
    """All metrics of the kind of output."""
    if outputs.shape[1] == 1:
        return numbers.evaluate(outputs[:, 0], labels)
    return metrics.evaluate(outputs, labels)


def intervals(
    outputs: Array, labels: Array, subjects: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Intervals of those that have one with so many people (``subjects``, of each scan)."""
    if outputs.shape[1] == 1:
        return numbers.intervals(outputs[:, 0], labels, subjects)
    return of_classes.intervals(outputs, labels, subjects)


def not_learnt(outputs: Array, labels: Array, class_names: Sequence[str]) -> str:
    """A sentence about a network that never names a class, or tells all the same number."""
    if outputs.shape[1] == 1:
        return numbers.hardly_differ(outputs[:, 0], labels, class_names[0])
    return metrics.never_named(outputs, class_names)


def measured(outputs: Array, labels: Array, subjects: Sequence[str]) -> dict[str, float]:
    """All metrics, and the ends of their intervals as ``<metric>_low`` and ``<metric>_high``."""
    values = evaluate(outputs, labels)
    for name, (low, high) in intervals(outputs, labels, subjects).items():
        values |= {f"{name}_low": low, f"{name}_high": high}
    return values
