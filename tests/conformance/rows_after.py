"""What later lines of a script ask on every rank, after the run."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row, Run
from torch.utils.data import DataLoader


class _Remembers(Callback):
    """On its class, which all of its kind share."""

    losses: ClassVar[list[float]] = []
    by_batch: ClassVar[dict[int, float]] = {}
    alias = losses
    calls = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        loss = outputs["loss"].item()
        self.losses.append(loss)
        self.by_batch[trainer.global_step] = loss
        type(self).calls += 1


class AsksAfterFit(Row):
    """The script asks every rank after the run for numbers of steps and batches, loaders and
    schedulers; then it validates, and asks again. On workers these are stand-ins that know their
    numbers and refuse everything else.
    """

    shapes = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
    fast = True
    options: ClassVar = {"max_steps": -1, "max_epochs": 2, "num_sanity_val_steps": 0}
    seen_by_class: ClassVar[list[float]] = []

    def trainer_options(self, folder: Any) -> dict[str, Any]:
        for holder in (_Remembers.losses, _Remembers.by_batch, self.seen_by_class):
            holder.clear()
        _Remembers.calls = 0
        return {**self.options, "callbacks": [_Remembers()]}

    def val_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.dataset(size), batch_size=4) for size in (8, 12)]

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen_by_class.append(outputs["loss"].item())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(*batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def exercise(self, run: Run) -> Any:
        trainer = run.trainer()
        trainer.fit(self)
        scheduler: Any = self.lr_schedulers()
        [config] = trainer.lr_scheduler_configs
        found: list[Any] = [trainer.estimated_stepping_batches, len(trainer.train_dataloader)]
        found += [len(trainer.val_dataloaders), [len(each) for each in trainer.val_dataloaders]]
        found += [trainer.val_dataloaders[1].batch_size, trainer.test_dataloaders is None]
        found += [scheduler.get_last_lr(), scheduler.last_epoch, config.interval]
        found += [scheduler.state_dict()["gamma"], [*_Remembers.losses], [*_Remembers.alias]]
        found += [dict(_Remembers.by_batch), _Remembers.calls, [*self.seen_by_class]]
        found += trainer.validate(self, verbose=False)
        found += [[len(each) for each in trainer.val_dataloaders], scheduler.get_last_lr()]
        found += [trainer.estimated_stepping_batches]  # the loader is gone: all make it anew
        run.trainer(max_epochs=1).fit(self)
        return [*found, len(_Remembers.losses)]
