"""A model that fits on no device: no rank ever holds all of it.

Each rank makes the layers of its stage in ``configure_model``; checkpoints are ordinary files.

python examples/large_model.py [--devices 2] [--accelerator cpu] [--width 256] [--layers 8]
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy


class LargeModel(pl.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if hasattr(self, "net"):  # Lightning calls this again for validate, test, ...
            return
        width, layers = self.hparams.width, self.hparams.layers
        hidden = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(*hidden, nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    pl.seed_everything(0)
    x = torch.randn(256, options.width)
    loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=32)

    def trainer(epochs: int) -> pl.Trainer:
        strategy = HybridGabraStrategy(pipeline_parallel_size=options.devices)
        device = {"accelerator": options.accelerator, "devices": options.devices}
        return pl.Trainer(strategy=strategy, max_epochs=epochs, **device)

    sizes = options.width, options.layers
    first = trainer(epochs=1)
    first.fit(LargeModel(*sizes), loader)
    first.save_checkpoint("large_model.ckpt")
    trainer(epochs=2).fit(LargeModel(*sizes), loader, ckpt_path="large_model.ckpt")
