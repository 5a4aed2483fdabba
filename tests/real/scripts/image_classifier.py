"""A classifier of timm, as in its quick start."""

from typing import Any

import lightning.pytorch as pl
import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import DataLoader, TensorDataset

OPTIONS: dict[str, Any] = {"max_epochs": 2}
STRATEGY = {"num_microbatches": 1}  # batch statistics are those of the whole batch


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("resnet18", pretrained=False, num_classes=5)
        self.criterion = LabelSmoothingCrossEntropy(smoothing=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = self.criterion(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        features = self.model.forward_features(images)
        logits = self.model.forward_head(features)
        self.log("accuracy", (logits.argmax(1) == labels).double().mean())

    def configure_optimizers(self) -> Any:
        optimizer = create_optimizer_v2(
            self.model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4
        )
        scheduler = CosineLRScheduler(optimizer, t_initial=2, warmup_t=1, warmup_lr_init=0.01)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


def module() -> pl.LightningModule:
    return Classifier()


def loaders() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 32, 32, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(images, torch.arange(8) % 5), batch_size=4)
    return loader, loader
