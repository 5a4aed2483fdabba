"""Pictures of results, while a network trains, for loggers that take figures."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from matplotlib.figure import Figure

from models.drawing import figures_of
from models.predictions import arrays


class LogFigures(Callback):
    """Give ROC, confusion matrix and calibration plot to every logger that takes figures.

    Where a number is told: told over true numbers, and a Bland-Altman plot.

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
        outputs, labels, _ = arrays(getattr(pl_module, "evaluated", []))
        if not trainer.is_global_zero or not len(labels):
            return
        names: Sequence[str] = getattr(pl_module, "class_names", ())
        for name, draw in figures_of(names).items():
            figure = draw(outputs, labels, names)
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
