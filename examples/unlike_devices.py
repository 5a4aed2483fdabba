"""Devices that are not alike: each replica takes samples by the speed of its devices.

python examples/unlike_devices.py [--devices 2] [--accelerator gpu]
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import BySpeed, HybridGabraStrategy, Search


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), *layers, nn.Linear(256, 4))

    def training_step(self, batch, batch_idx):
        # its own samples only: the gradients of all replicas are weighted by their numbers
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args()
    pl.seed_everything(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    strategy = HybridGabraStrategy(
        data_parallel_size=options.devices,
        replicas=BySpeed(),
        # leave this out: speeds are measured. Here the first device is told to be the fastest
        search=Search(capacity=[1.0, *[0.4] * (options.devices - 1)]),
    )
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=strategy,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
    )
    # 32 samples of each replica on average: 64 with two, of which the first takes 46
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
    print(trainer.callback_metrics)
