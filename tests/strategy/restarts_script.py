"""A user's script that torchrun may start again: ``torchrun ... SCRIPT FOLDER REPLICAS``.

It goes on from the last checkpoint of FOLDER, with as many processes as there are then.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy

EPOCHS = 6


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))]
        self.net = nn.Sequential(*layers, nn.Linear(8, 4)).double()
        self.losses = dict[int, float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)  # so that a kill meets a step more often than an import
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses[self.global_step] = loss.item()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = dict(self.losses)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = dict(checkpoint["losses"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder: Path, replicas: int) -> None:
    seed_everything(5, verbose=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 4, (40,), generator=generator))
    processes, hosts = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    (folder / f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
    with (folder / "starts.txt").open("a") as starts:
        starts.write(f"{os.environ['RANK']} of {processes * hosts}\n")
    microbatches = 2 if processes * hosts > replicas else 1
    trainer = Trainer(
        # as many stages as there are processes, two replicas of them where that is asked for
        # masks of dropout are those of one device, however many stages there are
        strategy=HybridGabraStrategy(
            data_parallel_size=replicas, num_microbatches=microbatches, rng="device"
        ),
        accelerator="cpu",
        devices=processes,
        num_nodes=hosts,
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    # a batch of 8 samples in all, however many replicas there are
    loader = DataLoader(data, batch_size=8 // trainer.world_size)
    # the first start finds no checkpoint, of which Lightning warns
    trainer.fit(module, loader, DataLoader(data, batch_size=8), ckpt_path="last")
    if trainer.is_global_zero:
        torch.save([module.losses, module.state_dict()], folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
