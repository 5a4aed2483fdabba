"""Trains several networks with sizes that are left open, and with the same sizes given.

``python automatic_sizes_script.py FOLDER``; FOLDER holds ``config.json``, each driver leaves there
what it has seen, as ``rank<N>.pt``.
"""

import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS = 6


class Samples(Dataset):
    """Random samples that count how often they were read, drawn as augmentations are."""

    def __init__(self, width: int) -> None:
        self.width, self.reads = width, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        sample = torch.full((self.width,), index / 64) + 0.1 * torch.randn(self.width)
        return sample * (1 + random.random()) * float(1 + np.random.rand())


class Module(LightningModule):
    """Linear layers with dropout."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        self.net = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(width, 1))
        self.width, self.losses, self.batches = width, [], []

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.batches.append(batch.double().sum().item())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True)
        self.logger.log_metrics({"by hand": loss.item()}, self.global_step)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Unpacks(Module):
    """Its step needs what a hook before it has made."""

    def on_train_start(self) -> None:
        self.scale = 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch * self.scale, batch_idx)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Meets(Module):
    """Samples meet between its layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.net.insert(1, Centred())


class Fails(Module):
    """One rank fails before sizes are known."""

    def setup(self, stage: str) -> None:
        if self.trainer.local_rank == 1:
            raise ValueError("this error is on purpose")


class Made(Module):
    """The network is made in `configure_model`."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.depth, self.net = depth, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Module(self.width, self.depth).net


class Data(LightningDataModule):
    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples, self.opened = samples, 0

    def train_dataloader(self) -> DataLoader:
        self.opened += 1
        return DataLoader(self.samples, batch_size=4, shuffle=True)


class DividedInSetup(Data):
    """What it hears in `setup` is what it trains with."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.batch_size = 32 // self.trainer.world_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True)


class Prepared(Data):
    """As tutorials do it: what is loaded from is made in `prepare_data`."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(samples)
        self.made: Samples | None = None

    def prepare_data(self) -> None:
        self.made, self.train = self.samples, self.samples

    def train_dataloader(self) -> DataLoader:
        self.opened += 1
        return DataLoader(self.train, batch_size=4, shuffle=True)


class Hooks(Callback):
    """Counts what the Trainer calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls["batch"] += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls["zero_grad"] += 1


class _Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def batches(samples: Samples) -> Iterator[Tensor]:
    """A loader that can be opened once."""
    for first in range(0, 64, 4):
        yield torch.stack([samples[i] for i in range(first, first + 4)])


class Once:
    """Holds such a loader."""

    def __init__(self, samples: Samples) -> None:
        self.batches = batches(samples)

    def __iter__(self) -> Iterator[Tensor]:
        return self.batches


SIZES = ("data_parallel_size", "pipeline_parallel_size", "num_microbatches")
NETWORKS = {"tiny": (Module, 8, 3), "wide": (Module, 1024, 20), "unpacks": (Unpacks, 8, 3)}
NETWORKS |= {"made": (Made, 8, 3), "fails": (Fails, 8, 3), "meets": (Meets, 8, 3)}


def fit(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one network. Returns what a user would look at."""
    seed_everything(3, verbose=False)
    kind, width, depth = NETWORKS[job["network"]]
    module, samples, hooks = kind(width, depth), Samples(width), Hooks()
    strategy: Any = job["strategy"]
    if isinstance(strategy, list):
        from lightning_hybrid import HybridGabraStrategy

        strategy = HybridGabraStrategy(**dict(zip(SIZES, strategy)), **job.get("arguments", {}))
    data = {
        "in setup": DividedInSetup,
        "prepared": Prepared,
    }.get(job.get("loader"), Data)(samples)
    loaders: dict[str, Any] = {"datamodule": data}
    if job.get("loader") == "plain":
        loaders = {"train_dataloaders": DataLoader(samples, batch_size=4, shuffle=True)}
    elif job.get("loader") == "once":
        loaders = {"train_dataloaders": Once(samples)}
    listening = _Listening()
    logging.getLogger("lightning.pytorch").addHandler(listening)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        logger=CSVLogger(folder, name=job["name"], flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[hooks, ThroughputMonitor(len)] if job.get("monitors") else [hooks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if job.get("asks before"):
        print("told before:", trainer.global_rank, "of", trainer.world_size, flush=True)
    if job.get("predicts first"):
        trainer.predict(module, DataLoader(torch.ones(4, width), batch_size=4))
        seed_everything(3, verbose=False)
    try:
        trainer.fit(module, **loaders)
    except (ValueError, AttributeError) as error:
        return {"error": str(error), "said": listening.texts}
    if job.get("predicts first"):
        trainer.predict(module, DataLoader(torch.ones(4, width), batch_size=4))
    logging.getLogger("lightning.pytorch").removeHandler(listening)
    plan = getattr(trainer.strategy, "plan", None)
    metrics = Path(trainer.logger.log_dir) / "metrics.csv"
    return {
        "shape": (trainer.world_size, trainer.global_rank),
        "microbatches": plan and plan.microbatches,
        "said": listening.texts,
        "user": {
            "losses": module.losses,
            "batches": module.batches,
            "weights": {} if isinstance(module, Made) else module.state_dict(),
            "calls": dict(hooks.calls),
            "reads": samples.reads,
            "opened": data.opened,
            "logged": {n: float(v) for n, v in trainer.logged_metrics.items()},
            "csv": metrics.read_text() if trainer.is_global_zero else "",
            "draws": (torch.rand(2).tolist(), random.random(), float(np.random.rand())),
        },
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text())
    seen: dict[str, Any] = {}
    for job in config["jobs"]:
        if job["strategy"] == "as chosen":  # with the sizes of an earlier job
            before = seen[job["after"]]
            replicas, _ = before["shape"]
            job["strategy"] = [replicas, 2 // replicas, before["microbatches"] or 1]
        seen[job["name"]] = fit(job, folder)
    torch.save(seen, folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
