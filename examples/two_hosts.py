"""Processes that ``torchrun`` starts, on one host or on several: nothing in the script changes.

On each of two hosts, with two devices each:

torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 \
    --rdzv-id any examples/two_hosts.py --hosts 2

On one host: torchrun --nproc-per-node 2 examples/two_hosts.py
"""

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        hidden = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())]
        self.net = nn.Sequential(*hidden, nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)  # the mean over replicas; stages hold one value
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args()

    pl.seed_everything(0)
    x = torch.randn(256, 64)
    # stages of a replica sit on one host where that is possible: activations are large,
    # and gradients are averaged between hosts while the backward runs
    strategy = HybridGabraStrategy(pipeline_parallel_size=2)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        num_nodes=options.hosts,
        strategy=strategy,
        max_epochs=2,
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=32))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} replica(s): {trainer.callback_metrics}")
