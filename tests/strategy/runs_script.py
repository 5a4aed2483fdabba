"""Short runs one after the other in one group of processes: ``python runs_script.py FOLDER``.

FOLDER holds ``runs.json``, the number of stages and a list of runs (see ``DEFAULTS``); the driver
leaves there what it has seen of each, as ``rank0.pt``.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

DEFAULTS: dict[str, Any] = {
    "schedule": "gpipe",
    "weights": "stash",
    "optimizer": "momentum",
    "precision": "64-true",
    "steps": 30,
    "epoch": 30,  # batches
    "window": 1,
    "saves_after": [],  # batches that are trained on
    "saves_to": "",  # a folder
    "resumes": "",  # a checkpoint
}
OPTIMIZERS: dict[str, Any] = {
    "plain": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}
PAIRS, SIZE = 4, 4


def network() -> nn.Sequential:
    """Pairs of a linear layer and a `Tanh`."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(PAIRS) for layer in (nn.Linear(3, 3), nn.Tanh())])


def ends_of(stages: int) -> list[int]:
    """Numbers of the first and of the last layers of stages; the same as `in_stages`."""
    return [2 * round(PAIRS * k / stages) for k in range(stages + 1)]


def samples(epoch: int) -> Tensor:
    """Those of an epoch, (epoch * SIZE, 3)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(epoch, SIZE, 3, generator=generator).flatten(0, 1)


class Chain(LightningModule):
    """Learns to give zeros."""

    def __init__(self, run: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.run = network(), run
        if run["precision"] == "64-true":  # Lightning loads checkpoints before it converts
            self.net.double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        kind, options = OPTIMIZERS[self.run["optimizer"]]
        return kind(self.net.parameters(), **options)


class Loader(DataLoader):
    """Begins its first epoch where a checkpoint was saved; one with a state would be refused."""

    skipped = 0

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        return islice(super().__iter__(), skipped, None)


class Saves(Callback):
    """After chosen batches, counted from the start of the run, in the middle of windows too."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._after, self._folder = run["saves_after"], Path(run["saves_to"])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if batches in self._after:
            trainer.save_checkpoint(self._folder / f"{batches}.ckpt")


def train(run: dict[str, Any], stages: int, folder: Path) -> dict[str, Any]:
    """One of the runs; of one stage: by plain Lightning. Returns its losses and weights."""
    run = {**DEFAULTS, **run}
    seed_everything(0, verbose=False)
    module = Chain(run)
    strategy: Any = "auto"
    if stages > 1:
        from lightning_hybrid import Delayed, HybridGabraStrategy

        schedule = run["schedule"]
        if schedule != "1f1b_stream":
            schedule = Delayed(schedule, weights=run["weights"])
        strategy = HybridGabraStrategy(
            pipeline_parallel_size=stages,
            num_microbatches=1,
            plan=[f"net.{end}" for _, end in pairwise(ends_of(stages)[:-1])],
            schedule=schedule,
        )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=stages,
        precision=run["precision"],
        max_steps=run["steps"],
        max_epochs=-1,
        accumulate_grad_batches=run["window"],
        default_root_dir=folder,
        callbacks=[Saves(run)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # (a process makes the batches, as streamed schedules want it)
    loader = Loader(TensorDataset(samples(run["epoch"])), batch_size=SIZE, num_workers=1)
    if run["resumes"]:
        loader.skipped = int(Path(run["resumes"]).stem) % run["epoch"]
    trainer.fit(module, loader, ckpt_path=run["resumes"] or None)
    return {"losses": module.losses, "weights": module.net.state_dict()}


def main(folder: Path) -> None:
    told = json.loads((folder / "runs.json").read_text())
    seen = []
    for run in told["runs"]:
        print(run, flush=True)
        seen.append(train(run, told["stages"], folder))
    torch.save(seen, folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
