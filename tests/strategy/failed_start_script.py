"""A user's script of which one rank fails before its first command: ``python ... FOLDER``.

FOLDER holds ``config.json``: which step of the start fails, on which rank, and whether the script
catches the error and stays; or that the rank stops between two runs. It leaves there when that was,
in ``fault``.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.comm import mesh
from lightning_hybrid.process import World, joining
from lightning_hybrid.run import DriverSession, Run
from lightning_hybrid.strategy import agreed_sizes, ranks
from lightning_hybrid.worker.worker import Worker

STEPS: dict[str, tuple[Any, str]] = {
    "store": (joining, "make_store"),
    "world": (joining, "make_world"),
    "survey": (ranks, "look_around"),
    **dict.fromkeys(
        ("control", "data", "drivers", "activations", "gradients"), (mesh, "make_group")
    ),
    "bytes": (mesh.Mesh, "_meet"),
    "default": (mesh.Mesh, "_init_default_group"),
    "barrier": (World, "barrier"),
    "rehearsal": (agreed_sizes, "choose_on_rank_0"),
    "sizes": (World, "broadcast"),
    "weights": (Run, "share_weights"),
    "session": (DriverSession, "__init__"),
    "serve": (Worker, "serve"),
    "command": (DriverSession, "step"),
}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def test_step(self, batch: Tensor) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fail_in(step: str, folder: Path) -> None:
    owner, name = STEPS[step]
    whole: Callable[..., Any] = getattr(owner, name)

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if name == "make_group" and not str(arguments[1]).startswith(step):
            return whole(*arguments, **keywords)
        (folder / "fault").write_text(str(time.monotonic()))
        raise OSError("this error is on purpose")

    setattr(owner, name, failing)


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    replicas, stages, hosts = config["replicas"], config["stages"], config["hosts"]
    per_host = replicas * stages // hosts
    here = int(os.environ.get("NODE_RANK", 0)) * per_host + int(os.environ.get("LOCAL_RANK", 0))
    stops = config["step"] == "stops"
    if here == config["rank"] and not stops:
        fail_in(config["step"], folder)
    sizes: dict[str, Any] = {"data_parallel_size": replicas, "pipeline_parallel_size": stages}
    opened = config["step"] in ("rehearsal", "sizes")
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            **({} if opened else sizes), timeout=timedelta(seconds=config.get("timeout_s", 1800))
        ),
        accelerator="cpu",
        devices=per_host,
        num_nodes=hosts,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model, loader = Model(), DataLoader(torch.randn(16, 8), 4)
    try:
        trainer.fit(model, loader)
        if stops and here == config["rank"]:
            (folder / "fault").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)
        trainer.test(model, loader)
    except OSError:
        if not config["stays"] or here != config["rank"]:  # (others raise this error, too)
            raise
        time.sleep(20)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
