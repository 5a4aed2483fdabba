from time import perf_counter

from lightning.pytorch import Callback, LightningModule, Trainer


class EpochTime(Callback):
    """Log ``epoch_s``, the seconds that the training batches of an epoch took (no validation)."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._started_s = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._spent_s = 0.0
        self._started_s = perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._spent_s += perf_counter() - self._started_s

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_s = perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        spent_s = self._spent_s + perf_counter() - self._started_s
        pl_module.log("epoch_s", spent_s, sync_dist=True)
