"""What later lines of a script ask on every rank, after the run."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row, Run
from torch.utils.data import DataLoader


class _Remembers(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.by_batch: dict[int, float] = {}
        self.calls = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = outputs["loss"].item()
        self.losses.append(loss)
        self.by_batch[trainer.global_step] = loss
        self.calls += 1


class AsksAfterFit(Row):
    """The script asks every rank after the run for numbers of steps, and for what a callback has
    counted; then it validates, and asks again.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    fast = True
    options: ClassVar = {"max_steps": -1, "max_epochs": 2, "num_sanity_val_steps": 0}

    def trainer_options(self, folder: Any) -> dict[str, Any]:
        return {**self.options, "callbacks": [_Remembers()]}

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.dataset(size), batch_size=4) for size in (8, 12)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(*batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        found: list[Any] = [trainer.estimated_stepping_batches, *self.asked(trainer)]
        found += trainer.validate(self, verbose=False)
        found += [trainer.estimated_stepping_batches]  # the loader is gone: all make it anew
        again = run.trainer(max_epochs=1)
        again.fit(self)
        return [*found, *self.asked(again)]

    def asked(self, trainer: Any) -> list[Any]:
        [counter] = [each for each in trainer.callbacks if isinstance(each, _Remembers)]
        steps = trainer.global_step, trainer.current_epoch
        return [*steps, counter.losses, counter.by_batch, counter.calls]
