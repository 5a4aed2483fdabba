"""A script of a user of `pytorch_lightning`: ``python pytorch_lightning_script.py FOLDER``.

FOLDER holds ``config.json``; each process that gets to the end leaves ``rank<N>.pt`` there.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(3) for part in (nn.Linear(6, 6), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(6, 3)).double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        self.log("with_lightning", float("lightning" in sys.modules))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)


def strategy(name: str) -> Any:
    if not name.startswith("object"):
        return name
    return lightning_hybrid.HybridGabraStrategy(
        pipeline_parallel_size=2,
        num_microbatches=2,
        plan=["net.4"],
        start_method="spawn" if name.endswith("spawn") else "popen",
    )


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    pl.seed_everything(0, verbose=False)
    module = Classifier()
    trainer = pl.Trainer(
        strategy=strategy(config["strategy"]),
        accelerator="cpu",
        devices=config["stages"],
        max_epochs=3,
        default_root_dir=folder,
        callbacks=[pl.callbacks.ModelCheckpoint(folder / "checkpoints", save_weights_only=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    metrics = dict(trainer.callback_metrics)
    if not config["strategy"].endswith("spawn"):  # it fits once
        trainer.test(module, loader(), ckpt_path="best", verbose=False)
        metrics |= trainer.callback_metrics
    seen = {
        "pid": os.getpid(),
        "losses": module.losses,
        "weights": module.state_dict(),
        "metrics": metrics,
        "plan": getattr(trainer.strategy, "plan", None),
        "global_step": trainer.global_step,
    }
    torch.save(seen, folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
