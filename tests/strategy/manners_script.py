"""What a script sees that catches errors around `fit`; `test_manners.py` runs it."""

import json
import os
import sys
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_hybrid import HybridGabraStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class OnPurpose(Exception):
    """Python cannot pickle it by itself."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"{reason} in step {step}")
        self.step = step


class Model(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.config, self.steps = config, 0
        self.losses: list[float] = []
        self.net[0].register_forward_hook(self.ran)

    @property
    def rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def fail(self, where: str) -> None:
        fault = self.config.get("fault") or {}
        if fault.get("where") == where and fault.get("rank") in (None, self.rank):
            raise OnPurpose(self.steps, f"on purpose in {where}")

    def ran(self, *_: Any) -> None:
        if self.steps >= 2 and self.rank == 1:  # looking at the network is no step
            self.fail("stage")
        self.steps += self.rank

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        if self.rank != 1:
            self.steps += 1
        if self.steps == 3:
            self.fail("training_step")
        return loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CopiesCallbacks(Callback):
    """A habit of tests: look at callbacks as they were."""

    def __init__(self) -> None:
        self.copies = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.copies += len(deepcopy(trainer.callbacks)) > 0


def make_trainer(config: dict[str, Any], folder: Path) -> Trainer:
    replicas, stages = config["replicas"], config["stages"]
    strategy: Any = "auto"
    if config["strategy"] == "hybrid":
        strategy = HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            num_microbatches=1,
            allocation=["net.2"] if stages == 2 else ["net.1", "net.2"],
        )
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=replicas * stages if strategy != "auto" else 1,
        max_steps=6,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[CopiesCallbacks(), TQDMProgressBar(1000)] if config.get("copies") else [],
        enable_progress_bar=bool(config.get("copies")),
    )


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hybrid")]


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model, seen = Model(config), {}
    trainer = make_trainer(config, folder)
    try:
        trainer.fit(model)
    except OnPurpose as error:
        seen["caught"], seen["step"] = str(error), error.step if hasattr(error, "step") else None
        seen["cause"] = str(error.__cause__)
    except RuntimeError as error:
        seen["other"] = f"{type(error).__name__}: {error}"
    seen["threads"] = ours()
    seen["left"] = {name: value.clone() for name, value in model.state_dict().items()}
    seen["copies"] = sum(getattr(callback, "copies", 0) for callback in trainer.callbacks)
    if config.get("again"):
        model.config, model.losses = {}, []
        make_trainer(config, folder).fit(model)
        seen["threads"] += ours()
    seen["losses"] = model.losses
    seen["weights"] = model.state_dict()
    return seen


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    torch.save(run(config, folder), folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
