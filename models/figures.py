"""Pictures of a classifier's results: ROC, confusion matrix, calibration; and how to log them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from matplotlib.figure import Figure

from models.calibration import observed, slope_and_intercept
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
    slope, intercept = slope_and_intercept(positive, labels)
    shown = "classes apart" if np.isnan(slope) else f"slope {slope:.2f}"
    title = f"calibration: {shown}, intercept {intercept:.2f}"
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


class LogFigures(Callback):
    """Give ROC, confusion matrix and calibration plot to every logger that takes figures.

    After validation every ``every_n_epochs`` epochs and at the last one, and after a test. Known:
    TensorBoard, Weights & Biases, MLflow, Comet, Neptune; other loggers are left alone. (``python
    -m models test`` has no logger: it saves these figures beside the metrics.)

    Args:
        every_n_epochs: How often to draw.
    """

    def __init__(self, every_n_epochs: int = 10) -> None:
        self.every_n_epochs = every_n_epochs

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        last = epoch == trainer.max_epochs
        if not trainer.sanity_checking and (last or epoch % self.every_n_epochs == 0):
            self._log(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, pl_module, "test")

    def _log(self, trainer: Trainer, pl_module: LightningModule, part: str) -> None:
        probabilities, labels, _ = arrays(getattr(pl_module, "evaluated", []))
        if not trainer.is_global_zero or not len(labels):
            return
        names: Sequence[str] = getattr(pl_module, "class_names", ())
        for name, draw in FIGURES.items():
            figure = draw(probabilities, labels, names)
            for logger in trainer.loggers:
                log_figure(logger, f"{part}/{name}", figure, trainer.global_step)


def log_figure(logger: Logger, name: str, figure: Figure, step: int) -> bool:
    """Log one figure; whether the logger takes figures. Loggers are known by their methods."""
    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "add_figure"):  # TensorBoard
        experiment.add_figure(name, figure, global_step=step, close=False)
    elif hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image(key=name, images=[figure], step=step)
    elif hasattr(logger, "run_id") and hasattr(experiment, "log_figure"):  # MLflow
        experiment.log_figure(logger.run_id, figure, f"{name}.png")
    elif hasattr(experiment, "log_figure"):  # Comet
        experiment.log_figure(figure_name=name, figure=figure, step=step)
    elif hasattr(experiment, "get_structure"):  # Neptune
        experiment[name].append(figure, step=step)
    else:
        return False
    return True


def _axes(x: str, y: str, title: str) -> tuple[Figure, Any]:
    # a Figure of its own: pyplot would keep it, and ask for a display
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    return figure, axes
