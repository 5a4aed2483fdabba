"""A script with a LightningCLI: ``python cli_script.py fit --config FILE``."""

import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid  # noqa: F401 (registers the short names of the strategy)


class Regression(LightningModule):
    """Two layers, one for each stage.

    Args:
        width: of the layer between.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.ones(8, 6)), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    cli = LightningCLI(Regression, seed_everything_default=1)
    weights = {name: value.clone() for name, value in cli.model.state_dict().items()}
    seen = {"pid": os.getpid(), "plan": cli.trainer.strategy.plan, "weights": weights}
    rank = os.environ.get("LOCAL_RANK", "0")
    torch.save(seen, Path(cli.trainer.default_root_dir) / f"rank{rank}.pt")
