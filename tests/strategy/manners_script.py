"""What a script sees that catches errors around `fit`, all of them in the same processes."""

import json
import sys
import threading
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.errors import DeferredError, NetworkError
from tests.ran_here import LISTENERS, OnPurpose, noting, rank

STEPS = 6
CUTS = {2: ["net.second"], 3: ["net.second", "net.third"]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(self.first(x))))


class Model(LightningModule):
    def __init__(self, fault: dict[str, Any]) -> None:
        super().__init__()
        self.net = Net().double()
        self.fault = fault
        self.losses: list[float] = []

    def fail(self, where: str) -> None:
        if self.fault.get("where") == where and self.fault["rank"] in (None, rank()):
            raise OnPurpose(len(self.losses), where)

    def setup(self, stage: str) -> None:
        self.fail("setup")
        for name, layer in self.net.named_children():
            layer.register_forward_hook(partial(noting, name))
        LISTENERS[:] = [lambda *_: None]  # this process is a driver

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A stage of this step fails: on a worker, or, on one device, here."""
        if self.global_step == 3 and self.fault.get("where") == "stage" and rank() == 0:
            weights(self)  # workers have made the step before
            Path("fails_in_stage").touch()
            self.fail("stage")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        if len(self.losses) == 3:
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
    """Looks at callbacks as they were. (A progress bar knows its Trainer.)"""

    def __init__(self) -> None:
        self.copies = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.copies += len(deepcopy(trainer.callbacks))


def make_trainer(config: dict[str, Any], folder: Path, **options: Any) -> Trainer:
    replicas, stages = config["replicas"], config["stages"]
    strategy: Any = "auto"
    if config["strategy"] == "hybrid":
        strategy = HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            num_microbatches=1,
            plan=CUTS[stages],
        )
    defaults = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=replicas * stages,
        max_steps=STEPS,
        default_root_dir=folder,
        **{**defaults, "enable_progress_bar": False, **options},
    )


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hybrid")]


def weights(model: Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def left(model: Model) -> dict[str, Tensor] | None:
    """``None`` on a driver that was in a backward when another replica failed."""
    try:
        return weights(model)
    except DeferredError:
        return None


def with_fault(config: dict[str, Any], fault: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A fit that fails, and one without the fault."""
    seed_everything(1, verbose=False)
    model, seen = Model(fault), {}

    try:
        make_trainer(config, folder).fit(model)
    except (OnPurpose, NetworkError) as error:
        seen["caught"], seen["cause"] = str(error), error.__cause__ and str(error.__cause__)
    except RuntimeError as error:
        seen["other"] = str(error)
    seen["threads"] = ours()
    seen["left"] = left(model)
    model.fault, model.losses = {}, []
    try:
        make_trainer(config, folder).fit(model)
    except DeferredError as error:  # on all drivers, if one lacks weights
        seen["refused"] = str(error)
        seed_everything(1, verbose=False)
        model = Model({})
        make_trainer(config, folder).fit(model)
    return {**seen, "losses": model.losses, "weights": weights(model)}


def with_copies(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A fit in which a callback copies all callbacks."""
    seed_everything(1, verbose=False)
    model, callback = Model({}), CopiesCallbacks()
    callbacks = [callback, TQDMProgressBar(1000)]
    make_trainer(config, folder, callbacks=callbacks, enable_progress_bar=True).fit(model)
    return {"copies": callback.copies, "weights": weights(model), "threads": ours()}


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    seen = {where: with_fault(config, fault, folder) for where, fault in config["faults"].items()}
    return {**seen, "copies": with_copies(config, folder)}


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    torch.save(run(config, folder), folder / f"rank{rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
