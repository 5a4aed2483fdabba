"""Pictures of a classifier's results: ROC, confusion matrix, calibration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from models.calibration import calibration_intervals, observed
from models.metrics import Array, calibration_curve, confusion, evaluate, roc
from models.predictions import Prediction, arrays
from models.results import beside

_SIZE = (4.2, 3.8)
_LINE = "#1f4e79"


def draw_roc(probabilities: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """The ROC curve; with more than two classes one of each against the others."""
    figure, axes = _axes("false positive rate", "true positive rate", "ROC")
    shown = (1,) if len(class_names) == 2 else range(len(class_names))
    for k in shown:
        misses, hits = roc(probabilities[:, k], labels == k)
        own = np.stack([1 - probabilities[:, k], probabilities[:, k]], axis=1)
        area = evaluate(own, (labels == k).astype(int))["auroc"]
        axes.plot(misses, hits, label=f"{class_names[k]}: area {area:.3f}")
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def draw_confusion(probabilities: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """Counts of label (rows) and predicted class (columns)."""
    counts = confusion(probabilities, labels)
    figure, axes = _axes("predicted", "label", "confusion matrix")
    axes.imshow(counts, cmap="Blues", vmin=0)
    ticks = range(len(class_names))
    axes.set_xticks(ticks, class_names)
    axes.set_yticks(ticks, class_names)
    middle = counts.max(initial=0) / 2
    for row, column in np.ndindex(*counts.shape):
        color = "white" if counts[row, column] > middle else "black"
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", color=color)
    return figure


def draw_calibration(probabilities: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """What was observed against what was said; the marks grow with the number of scans.

    For two classes the share of the last one against its probability, in groups of equal size with
    Wilson's intervals; for more, accuracy against confidence.
    """
    if len(class_names) == 2:
        return _draw_observed(probabilities[:, 1], labels, class_names[1])
    curve = calibration_curve(probabilities, labels)
    error = evaluate(probabilities, labels)["calibration_error"]
    figure, axes = _axes("confidence", "accuracy", f"calibration, error {error:.3f}")
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    confidence, right, scans = (np.array(column) for column in zip(*curve))
    axes.plot(confidence, right, color=_LINE, linewidth=1)
    axes.scatter(confidence, right, s=20 + 180 * scans / scans.sum(), color=_LINE)
    axes.set_xlim(1 / len(class_names) - 0.05, 1.02)
    axes.set_ylim(-0.02, 1.02)
    return figure


def _draw_observed(positive: Array, labels: Array, name: str) -> Figure:
    found = calibration_intervals(positive, labels)
    shown = (f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in sorted(found.items()))
    title = f"calibration: {', '.join(shown)}" if found else "calibration"
    figure, axes = _axes(f"P({name}), mean of a group", f"share of {name} observed", title)
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    groups = observed(positive, labels)
    said, shares, bounds, scans = (list(column) for column in zip(*groups))
    axes.plot(said, shares, color=_LINE, linewidth=1)
    axes.scatter(said, shares, s=[20 + 180 * n / sum(scans) for n in scans], color=_LINE)
    for x, ends in zip(said, bounds):
        if ends is not None:
            axes.plot([x, x], ends, color=_LINE, linewidth=1, alpha=0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    return figure


FIGURES = {"roc": draw_roc, "confusion": draw_confusion, "calibration": draw_calibration}


def save_figures(
    predictions: Sequence[Prediction], class_names: Sequence[str], metrics: Path
) -> list[Path]:
    """Save all figures as PNG beside a file of metrics, with its number; none without labels."""
    probabilities, labels, _ = arrays(predictions)
    paths = []
    for name, draw in FIGURES.items() if len(labels) else ():
        paths.append(beside(metrics, name, ".png"))
        draw(probabilities, labels, class_names).savefig(paths[-1], dpi=100)
    return paths


def _axes(x: str, y: str, title: str) -> tuple[Figure, Any]:
    # a Figure of its own: pyplot would keep it, and ask for a display
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    return figure, axes
