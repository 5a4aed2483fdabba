"""A user's script with asynchronous replicas: ``python ... FOLDER``; each rank leaves a file."""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(
        x, torch.randint(0, 4, (samples,), generator=generator), torch.arange(samples)
    )


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


class Module(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.seen, self.net = config, list[list[int]](), network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, numbers = batch
        self.seen.append(numbers.tolist())
        stall = self.config.get("stall", 0.0)
        if stall and self.global_rank == 1:
            time.sleep(random.Random(len(self.seen)).choice([0.0, 0.0, 4 * stall]))
        if self.config.get("fails") == self.global_rank and len(self.seen) == 3:
            raise ValueError("the third step fails")
        if self.config.get("dies") == self.global_rank and len(self.seen) == 3:
            os._exit(7)
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.config.get("adam"):
            return torch.optim.Adam(self.parameters())
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def main(folder: Path) -> None:
    from lightning_hybrid import HybridGabraStrategy

    config = json.loads((folder / "config.json").read_text())
    seed_everything(5, verbose=False)
    module = Module(config)
    replicas, stages = config["replicas"], config["stages"]
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            data_parallel_size=replicas, pipeline_parallel_size=stages, **config["arguments"]
        ),
        accelerator="cpu",
        devices=replicas * stages,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"num_sanity_val_steps": 0, "max_epochs": 2, **config["trainer"]},
    )
    error = ""
    loader = DataLoader(data(config["samples"]), config["batch"], shuffle=True)
    try:
        trainer.fit(module, loader, DataLoader(data(8), 4), ckpt_path=config.get("ckpt_path"))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seen = {"seen": module.seen, "weights": dict(module.state_dict()), "error": error}
    torch.save(seen, folder / f"rank{trainer.strategy.cluster_environment.global_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
