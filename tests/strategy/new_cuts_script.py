"""A user's script with a device that is slower than planned: ``python ... FOLDER``.

FOLDER holds ``config.json``; each driver leaves there what it has seen, as ``rank<N>.pt``. What a
device has computed is not measured: it is what its plan says, divided by ``true`` speeds.
"""

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from records import read
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid.parts import device_times, replanning

SEED = 5
BATCHES = 26
"""Of an epoch and replica: two windows, and what is left out before them."""


class Net(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        layers = [m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh())]
        self.layers = nn.Sequential(*layers)
        # batch statistics are those of a micro-batch of one replica
        whole = config["replicas"] > 1 or config.get("loaded")
        self.norm = nn.LayerNorm(16) if whole else nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        if config.get("tied"):
            self.layers[-2].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x)))


class Module(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(3)
        self.net = Net(config).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        # of the second layer, which gets another owner
        self.kept = {"weight": [p for n, p in self.net.named_parameters() if "weight" in n][1]}
        self.losses, self.norms = list[float](), list[float]()
        self.automatic_optimization = not config.get("manual")
        if config.get("hooks"):
            for parameter in self.net.parameters():
                parameter.register_hook(lambda gradient: gradient * 0.5)

    def on_fit_start(self) -> None:
        if self.config.get("registers"):
            self.again = self.net.head.weight  # on the driver alone

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        # one device takes the micro-batches of batch normalisation one by one
        parts = x.chunk(2) if self.config.get("alone") else [x]
        output = torch.cat([self.net(part) for part in parts])
        loss = nn.functional.cross_entropy(self.scale * output, y)
        self.losses.append(loss.item())
        self.norms.append(float(self.kept["weight"].detach().norm()))
        if self.config.get("manual"):
            self.manual_backward(loss)
            optimizer = self.optimizers()
            if len(self.losses) % 7 == 0:  # a window goes on in the next epoch
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Deferred(Module):
    """Whose network is whole on no rank."""

    def configure_model(self) -> None:
        self.net = Net(self.config).double()


class Cuts(Callback):
    """Notes where the network is cut at the end of each epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ...]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen += [plan.cuts for plan in getattr(trainer.strategy, "_plans", {}).values()]


def loader(replicas: int = 1, *, whole: bool = False) -> DataLoader[Any]:
    """Batches of a replica; or the whole batches of all of them, as Lightning would deal them."""
    generator = torch.Generator().manual_seed(1)
    count = 8 * BATCHES * replicas
    x = torch.randn(count, 16, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))
    sampler = DistributedSampler(data, 1, 0, seed=SEED) if whole else None
    return DataLoader(data, 8 * replicas if whole else 8, sampler=sampler)


def measure(trainer: Trainer, speeds: list[Any]) -> None:
    """Let devices be as fast as that, by ``pp_rank``, whatever they do; or by replica."""

    totals: list[float] = []

    def read(_: device_times.StepWatcher) -> list[float]:
        here = trainer.strategy.coordinates
        true = speeds[here.dp_rank] if here.replicas > 1 else speeds
        plans = [*trainer.strategy._plans.values()]
        if not plans:
            return [0.0] * len(true)
        each = zip(replanning.planned_busy_s(plans[0]), plans[0].capacities, true)
        driver, *workers = [
            replanning.WINDOW * planned * capacity / speed for planned, capacity, speed in each
        ]
        before = totals or [0.0] * len(true)
        totals[:] = [a + b for a, b in zip(before, [*workers, driver])]
        return list(totals)

    device_times.StepWatcher.busy_s = read  # type: ignore[method-assign]
    ticks = count()  # no time passes that would matter
    clock = SimpleNamespace(perf_counter=lambda: 1e-9 * next(ticks))
    device_times.time = clock  # type: ignore[assignment]


def main(folder: Path) -> None:
    from lightning_hybrid import HybridGabraStrategy, Search

    config = json.loads((folder / "config.json").read_text(), object_hook=read)
    seed_everything(SEED, verbose=False)
    replicas, stages = config["replicas"], config["stages"]
    alone, cuts = config.get("alone", False), Cuts()
    module = (Deferred if config.get("deferred") else Module)(config)
    devices = 1 if alone else replicas * stages
    strategy: Any = "auto"
    if not alone:
        strategy = HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            num_microbatches=2,
            search=Search(capacity=[1.0] * devices, replan="epoch"),
            **config.get("arguments", {}),
        )
    callbacks: list[Callback] = [
        cuts,
        ModelCheckpoint(folder / "checkpoints", "{epoch}", save_top_k=-1, every_n_epochs=1),
    ]
    if config.get("averages"):
        callbacks.append(EMAWeightAveraging(decay=0.9))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        default_root_dir=folder,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **config["trainer"]},
    )
    if not alone:
        measure(trainer, config["true"])
    error = ""
    try:
        validation = loader() if config.get("validates") else None
        loaded = config.get("loaded", 0)
        train = loader(loaded, whole=True) if loaded else loader(replicas)
        trainer.fit(module, train, validation, ckpt_path=config.get("ckpt_path"))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seen = {
        "losses": module.losses,
        "norms": module.norms,
        # of a network that is whole on no rank nobody has all
        "weights": {} if config.get("deferred") else dict(module.state_dict()),
        "cuts": cuts.seen,
        "error": error,
        "validated": float(trainer.callback_metrics.get("val", 0.0)),
    }
    rank = 0 if alone else trainer.strategy.cluster_environment.global_rank()
    if not error and not config.get("deferred"):
        seen["optimizer"] = trainer.optimizers[0].state_dict()
    torch.save(seen, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
