"""A project that changes one argument: ``strategy``. Everything else stays as it was.

python examples/one_argument.py [--devices 2]
"""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_hybrid  # noqa: F401  registers the strategy


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 128, classes: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        hidden = [m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), *hidden, nn.Linear(width, classes)
        )
        self.accuracy = MulticlassAccuracy(classes)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    pl.seed_everything(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    trainer = pl.Trainer(
        accelerator="auto",
        devices=options.devices,
        strategy="hybrid_gabra",  # was "ddp"; replicas and stages are chosen by predicted time
        max_epochs=3,
        callbacks=[ModelCheckpoint(monitor="accuracy", mode="max"), LearningRateMonitor("epoch")],
        logger=CSVLogger("logs"),
    )
    module, validation = Classifier(), DataLoader(data, batch_size=64)
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), validation)
    trainer.validate(module, validation, ckpt_path="best")
