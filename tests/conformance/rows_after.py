"""What later lines of a script ask on every rank, after the run."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row, Run, load_checkpoint
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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
    """The script asks every rank for what the run has counted.

    It asks for numbers of steps, and for what a callback has counted. Then it validates, and asks
    again.
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


class _EndsOtherwise(Row):
    """An average of the weights is kept; at the end a hook changes attributes of the module."""

    options: ClassVar = {"max_epochs": 2, "max_steps": -1, "enable_checkpointing": True}

    def build(self) -> None:
        super().build()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.net)

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        trainer.save_checkpoint(run.folder / "after.ckpt")
        paths = trainer.checkpoint_callback.best_model_path, run.folder / "after.ckpt"
        saved = [load_checkpoint(Path(path), weights_only=False) for path in paths]
        return [[each["state_dict"], each["optimizer_states"]] for each in saved]


class AverageTakesOver(_EndsOtherwise):
    """`on_train_end` puts averaged weights in the place of the network."""

    fast = True

    def on_train_end(self) -> None:
        self.net = self.average


class _TakesTheInside(Callback):
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        module.net = module.average.module
        del module.average


class AverageInsideTakesOver(_EndsOtherwise):
    """A callback's `on_fit_end` puts averaged weights in the place of the network.

    It takes the network out of the average, and deletes the rest of it. Then that is tested.
    """

    def trainer_options(self, folder: Any) -> dict[str, Any]:
        return {**self.options, "callbacks": [_TakesTheInside()]}

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset(8), batch_size=4)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(*batch))

    def exercise(self, run: Run) -> Any:
        saved = super().exercise(run)
        return [saved, run.trainers[-1].test(self, verbose=False)]


class WrappedAtTheEnd(_EndsOtherwise):
    """The last `on_train_epoch_end` wraps the network in a new one.

    The checkpoint comes behind it.
    """

    gathered = True

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.net = nn.Sequential(self.net, nn.LogSoftmax(1))
