"""A user's script whose replicas take samples by their speed: ``python ... FOLDER``.

FOLDER holds ``config.json``; each driver leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from records import read
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(
        x, torch.randint(0, 4, (samples,), generator=generator), torch.arange(samples)
    )


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
    layers = nn.Linear(6, 8), middle, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


class Module(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.seen = config, list[tuple[int, list[int], float]]()
        self.net = network(config.get("norm", False))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.automatic_optimization = not config.get("manual", False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, numbers = batch
        loss = nn.functional.cross_entropy(self.scale * self.net(x), y)
        # on a slow device each sample takes longer
        time.sleep(len(x) * self.config.get("sleeps", [0, 0, 0])[self.trainer.global_rank])
        self.seen.append((self.current_epoch, numbers.tolist(), loss.item()))
        self.log("loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        if self.config.get("manual"):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Weighed(Module):
    """Whose loss is a mean over more than samples."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, numbers = batch
        weights = 1.0 + numbers % 3
        losses = nn.functional.cross_entropy(self.scale * self.net(x), y, reduction="none")
        return (weights * losses).sum() / weights.sum()

    def hybrid_weight(self, batch: list[Tensor]) -> float:
        return float((1.0 + batch[2] % 3).sum())


class OwnLoader(DataLoader):
    """A loader of a class of its own."""


class Mine(IterableDataset[Any]):
    """What each replica deals by itself: 3 samples and 2."""

    def __init__(self, whole: TensorDataset) -> None:
        self.whole = whole

    def __iter__(self) -> Any:
        first = int(os.environ["LOCAL_RANK"]) == 0
        part = (
            range(len(self.whole) * 3 // 5)
            if first
            else range(len(self.whole) * 3 // 5, len(self.whole))
        )
        return iter([self.whole[number] for number in part])


def loader(config: dict[str, Any]) -> DataLoader[Any]:
    whole = data(config["samples"])
    if config.get("own_samples"):
        return DataLoader(Mine(whole), batch_size=3 if os.environ["LOCAL_RANK"] == "0" else 2)
    apart = {"num_workers": 1, "multiprocessing_context": "fork"} if config.get("apart") else {}
    return OwnLoader(whole, config["batch"], shuffle=True, **apart)


def main(folder: Path) -> None:
    from lightning_hybrid import BySpeed, HybridGabraStrategy, Search

    config = json.loads((folder / "config.json").read_text(), object_hook=read)
    seed_everything(5, verbose=False)
    module = (Weighed if config.get("weighed") else Module)(config)
    replicas, stages = config["replicas"], config["stages"]
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            replicas=config.get("dealt", BySpeed()),
            search=Search(capacity=config["speeds"]),
        ),
        accelerator="cpu",
        devices=replicas * stages,
        default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=1)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"num_sanity_val_steps": 0, "max_epochs": 2, **config["trainer"]},
    )
    error = ""
    try:
        trainer.fit(module, loader(config), ckpt_path=config.get("ckpt_path"))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seen = {
        "seen": module.seen,
        "weights": dict(module.state_dict()),
        "logged": float(trainer.callback_metrics.get("loss", 0.0)),
        "error": error,
    }
    torch.save(seen, folder / f"rank{trainer.strategy.cluster_environment.global_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
