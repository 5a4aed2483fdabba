"""Pictures of results: ROC, confusion matrix, calibration; of a number two of told and true."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from models.calibration import calibration_intervals, observed
from models.metrics import Array, calibration_curve, confusion, roc
from models.predictions import Prediction, arrays
from models.results import beside
from models.scores import evaluate
from models.tasks import UNITS, is_number

_SIZE = (4.2, 3.8)
_LINE = "#1f4e79"
_LIMITS_OF = 20  # scans


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


def draw_told(outputs: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """Told numbers over true ones, with the line on which both are the same."""
    (name,), told = class_names, outputs[:, 0]
    known = evaluate(outputs, labels)
    title = f"mean absolute error {known['mae']:.2f} {UNITS[name]}"
    if not np.isnan(known["pearson_r"]):
        title += f", r {known['pearson_r']:.2f}"
    figure, axes = _axes(f"true {name}", f"told {name}", title)
    ends = [min(labels.min(), told.min()), max(labels.max(), told.max())]
    axes.plot(ends, ends, color="grey", linestyle=":", linewidth=1)
    axes.scatter(labels, told, s=14, color=_LINE, alpha=0.7)
    axes.set_aspect("equal", adjustable="datalim")
    return figure


def draw_bland_altman(outputs: Array, labels: Array, class_names: Sequence[str]) -> Figure:
    """Told minus true over their mean: the bias, and limits that hold 95 % (Bland and Altman).

    Of fewer than 20 scans no limits are drawn: they would be chance.
    """
    (name,), told = class_names, outputs[:, 0]
    off, middle = told - labels, (told + labels) / 2
    figure, axes = _axes(
        f"mean of told and true {name}", "told minus true", f"Bland-Altman, {len(off)} scans"
    )
    axes.scatter(middle, off, s=14, color=_LINE, alpha=0.7)
    axes.axhline(0, color="grey", linestyle=":", linewidth=1)
    lines = {"bias": off.mean()}
    if len(off) >= _LIMITS_OF:
        half = 1.96 * off.std(ddof=1)
        lines |= {"95 % from": off.mean() - half, "95 % to": off.mean() + half}
    ends = np.array([min(*off, *lines.values(), 0), max(*off, *lines.values(), 0)])
    axes.set_ylim(*(ends + np.ptp(ends) * np.array([-0.12, 0.12])))  # room for words on lines
    for text, at in lines.items():
        axes.axhline(at, color=_LINE, linewidth=1, linestyle="-" if text == "bias" else "--")
        axes.annotate(
            f"{text} {at:.1f}",
            (1, at),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
    return figure


_Draw = Callable[[Array, Array, Sequence[str]], Figure]
FIGURES: dict[str, _Draw] = {
    "roc": draw_roc,
    "confusion": draw_confusion,
    "calibration": draw_calibration,
}
NUMBER_FIGURES: dict[str, _Draw] = {"told": draw_told, "bland_altman": draw_bland_altman}


def figures_of(class_names: Sequence[str]) -> dict[str, _Draw]:
    """The pictures of a task with these names."""
    return NUMBER_FIGURES if is_number(class_names) else FIGURES


def save_figures(
    predictions: Sequence[Prediction], class_names: Sequence[str], metrics: Path
) -> list[Path]:
    """Save all figures as PNG beside a file of metrics, with its number; none without labels."""
    outputs, labels, _ = arrays(predictions)
    paths = []
    for name, draw in figures_of(class_names).items() if len(labels) else ():
        paths.append(beside(metrics, name, ".png"))
        draw(outputs, labels, class_names).savefig(paths[-1], dpi=100)
    return paths


def _axes(x: str, y: str, title: str) -> tuple[Figure, Any]:
    # a Figure of its own: pyplot would keep it, and ask for a display
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    return figure, axes
