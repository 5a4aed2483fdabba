"""A callback that writes what was said of each scan as one table."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from models.predictions import Prediction, Predictions, table_rows
from models.tables import write_table


class WritePredictions(Callback):
    """Write the predictions of a test or predict run as one table, whatever the number of ranks.

    Args:
        path: Of the table.

    Attributes:
        written: what the table has, on rank 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[Prediction] = []
        self._predictions = Predictions()

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._predictions.add(outputs, outputs["outputs"])

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, self._predictions.gathered())

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, getattr(pl_module, "evaluated", []))

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, predictions: list[Prediction]
    ) -> None:
        if not trainer.is_global_zero:
            return
        self.written = predictions
        names = getattr(pl_module, "class_names", ())
        write_table(table_rows(predictions, names, _details(trainer)), self.path)


def _details(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """What the data module's records say of each scan, by image ID."""
    records = getattr(getattr(trainer, "datamodule", None), "records", ())
    columns = ("session", "age", "sex", "site", "scanner", "fold")
    found = {}
    for record in records:
        values = {name: getattr(record, name, None) for name in columns}
        found[record.image_id] = {n: "" if value is None else value for n, value in values.items()}
    return found
