"""The LightningCLI: the strategy and its arguments come from the command line or a file.

python examples/cli.py fit --trainer.strategy HybridGabraStrategy --trainer.accelerator cpu \
    --trainer.strategy.pipeline_parallel_size 2 --trainer.devices 2 --trainer.max_epochs 2
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid  # noqa: F401  registers the strategy


class Autoencoder(pl.LightningModule):
    """Args: width: of the hidden layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers = [nn.Linear(16, width), *(nn.Linear(width, width) for _ in range(4))]
        hidden = [m for layer in layers for m in (layer, nn.ReLU())]
        self.net = nn.Sequential(*hidden, nn.Linear(width, 16))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.net(x), x)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Signals(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=32)


if __name__ == "__main__":
    LightningCLI(Autoencoder, Signals)
