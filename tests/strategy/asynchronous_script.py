"""A user's script with asynchronous replicas: ``python ... FOLDER``; each driver leaves a file."""

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
from lightning.pytorch.loggers import CSVLogger
from records import read
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


def rate(step: int) -> float:
    """By which the rate of a step is multiplied: a rise, then a fall."""
    return min((step + 1) / 4, 4 / (step + 1))


class Module(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.seen, self.net = config, list[list[int]](), network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, numbers = batch
        self.seen.append(numbers.tolist())
        if stall := self.config.get("stall"):
            time.sleep(random.Random(10 * self.global_rank + len(self.seen)).choice([0, 0, stall]))
        if self.config.get("fault") == [self.global_rank, len(self.seen)]:
            raise ValueError("this error is on purpose")
        if self.config.get("writes"):
            next(self.net.parameters()).data.zero_()
        loss = nn.functional.cross_entropy(self.net(x), y)
        together = bool(self.config.get("logs_together"))
        self.log("loss", loss, on_step=together, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        pid = Path(self.config["folder"]) / f"pid{self.global_rank}"
        pid.write_text(str(os.getpid()))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if kind := self.config.get("optimizer"):
            return getattr(torch.optim, kind)(self.parameters())
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(folder: Path) -> None:
    from lightning_hybrid import HybridGabraStrategy

    config = json.loads((folder / "config.json").read_text(), object_hook=read)
    config["folder"] = str(folder)
    seed_everything(5, verbose=False)
    module = Module(config)
    replicas = config["replicas"]
    strategy = HybridGabraStrategy(data_parallel_size=replicas, **config["arguments"])
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=replicas,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1)],
        logger=CSVLogger(folder, name=None, version=""),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"num_sanity_val_steps": 0, "max_epochs": 2, **config["trainer"]},
    )
    error = ""
    loader = DataLoader(data(config["samples"]), config["batch"], shuffle=True)
    try:
        trainer.fit(module, loader, DataLoader(data(8), 4), ckpt_path=config.get("ckpt_path"))
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
    seen = {
        "seen": module.seen,
        "weights": dict(module.state_dict()),
        "error": error,
        "metrics": dict(trainer.logged_metrics),
    }
    assert strategy.cluster_environment is not None
    torch.save(seen, folder / f"rank{strategy.cluster_environment.global_rank()}.pt")
    if "ConnectionLost" in error or "RemoteError" in error:
        raise SystemExit(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
