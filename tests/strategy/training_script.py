"""A user's script, as the tests of the strategy run it: ``python training_script.py FOLDER``.

FOLDER holds ``config.json``; each driver leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import pickle
import signal
import sys
import time
from collections import Counter
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.graph.row_rules import RULES
from models import ResAttNet3D
from tests.ran_here import LISTENERS, fault, hear_of_gradients, is_at_work, noting, rank, tick

CLASSES = 2
DELAYED = ("pipedream", "ddg", "fdg", "akintoye")


class Residual(nn.Module):
    """A small 3-D network with a skip connection and no batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.first = nn.Conv3d(8, 8, 3, padding=1)
        self.second = nn.Conv3d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = torch.relu(self.first(x))
        x = torch.relu(self.second(y) + x)
        return self.head(x.mean(dim=(2, 3, 4)))


class Dropped(nn.Module):
    """Random layers in every stage."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3))]
        self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Meets(Dropped):
    """Samples meet where numbers are large, which a wrong rule hides.

    (Of a network that draws, a check sees the first micro-batch alone.)
    """

    def __init__(self) -> None:
        super().__init__()
        RULES["flip"] = lambda f, call, outs: f.label(call["self"])
        kept = (layer for layer in self.layers if not isinstance(layer, nn.Dropout))
        self.layers = nn.Sequential(*kept)

    def forward(self, x: Tensor) -> Tensor:
        large = (x.abs() > 50) * self.layers[1].bias[0] ** 0  # (which stages compute)
        return super().forward(x + x.flip(0) * large)


class Meta(type):
    factor = 1.0


class Factor(metaclass=Meta):
    """TorchDynamo does not see that an attribute of its metaclass changes."""


class Unseen(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Factor.factor


class Ticks(Residual):
    """Its first stage has an operator that fails on a worker where the configuration says so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(tick((x * self.stem.bias[:1].view(1, 1, 1, 1, 1) ** 0).detach()))


NETWORKS = {
    "resattnet": lambda: ResAttNet3D(18),
    "residual": Residual,
    "unseen": Unseen,
    "ticks": Ticks,
    "dropout": Dropped,
    "meets": Meets,
}
# names of the first modules of the next stages, by number of stages
CUTS = {
    "resattnet": {
        2: ["layer2"],
        3: ["layer1.1", "layer3"],
        5: ["layer1.1", "layer2", "layer3", "layer4"],
    },
    "residual": {2: ["second"], 3: ["first", "head"], 4: ["first", "second", "head"]},
    "unseen": {2: ["second"]},
    "ticks": {2: ["second"]},
    "meets": {2: ["layers.3"]},
    "dropout": {
        2: ["layers.4"],
        3: ["layers.4", "layers.7"],
        4: ["layers.4", "layers.7", "layers.10"],
    },
}


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "still": (torch.optim.SGD, {"lr": 0.0}),
}


class Samples(TensorDataset):
    """Reading a sample may fail on purpose."""

    config: dict[str, Any]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        fault(self.config, "loader", index)
        return super().__getitem__(index)


class Loader(DataLoader):
    """Goes on in the middle of an epoch: Lightning asks for the state of loaders that have one."""

    seen = skipped = 0

    def __iter__(self) -> Any:
        self.seen, self.skipped = self.skipped, 0
        for batch in islice(super().__iter__(), self.seen, None):
            self.seen += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["seen"]


class Failing(Callback):
    """A callback that leaves word that this driver trains, and may fail on purpose."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *arguments: Any) -> None:
        if trainer.global_step > 3 and Path("config.json").exists():
            is_at_work()
        fault(module.config, "callback", trainer.global_step)


class Ended(Logger):
    """A logger that leaves word of how the run has ended."""

    name, version = "ended", 0

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def finalize(self, status: str) -> None:
        Path(f"ended.{rank()}").write_text(status)


def data(config: dict[str, Any]) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count, side = config["samples"], config["side"]
    x = torch.randn(count, 1, side, side, side, generator=generator)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    # learnable: the label is in the mean
    x += (y.float() - 0.5).view(-1, 1, 1, 1, 1)
    samples = Samples(x.to(getattr(torch, config["dtype"])), y)
    samples.config = config
    if config.get("unpicklable"):
        samples.unpicklable = lambda x: x
    return samples


class Classifier(LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.net = NETWORKS[config["network"]]().to(getattr(torch, config["dtype"]))
        self.automatic_optimization = config.get("optimizer") != "two"
        self.losses: list[float] = []
        self.forwards: Counter[str] = Counter()
        self.prepares = False
        self.gradients: Counter[str] = Counter()

    def setup(self, stage: str) -> None:
        """Note which modules run and which parameters get gradients in *this* process."""
        fault(self.config, "setup", 3)
        for name, module in self.net.named_modules():
            # (delayed schedules refuse an operator with a backward of its own, as the note is)
            if next(module.children(), None) is None and self.config.get("schedule") not in DELAYED:
                module.register_forward_hook(partial(noting, name))
        LISTENERS.append(self.ran)
        for name, parameter in self.net.named_parameters():
            hear_of_gradients(parameter, partial(self.got_gradient, name))

    def ran(self, name: str, trained: bool) -> None:
        """A module ran in this process."""
        if self.prepares:
            return
        self.forwards.update([name])
        if trained and self.forwards[name] == 10:
            fault(self.config, "forward", 3)

    def got_gradient(self, name: str) -> None:
        self.gradients.update([name])
        if self.gradients[name] == 10:
            fault(self.config, "backward", 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if not self.automatic_optimization:
            return self.step_by_hand(batch)
        x, y = batch
        if batch_idx == self.config.get("large"):
            x = x * 100
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        if batch_idx == self.config.get("unseen"):
            Meta.factor = 2.0
        self.log("train", loss, sync_dist=True)
        fault(self.config, "training_step", batch_idx)
        return loss

    def step_by_hand(self, batch: Any) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """In the first step the driver tries operations and measures layers of the network."""
        self.prepares = batch_idx == 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.prepares = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        fault(self.config, "validation_step", batch_idx)
        self.log("val", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        slow = self.config.get("slow_prediction_s", 0)
        if batch_idx == 0 and rank() == 1:
            time.sleep(slow)
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        fault(self.config, "configure_optimizers", 3)
        if not self.automatic_optimization:
            first, *others = self.net.parameters()
            return [
                torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": others[::2]}]),
                torch.optim.SGD(others[1::2], lr=0.01, momentum=0.9),
            ]
        kind, options = OPTIMIZERS[self.config.get("optimizer", "sgd")]
        optimizer = kind(self.parameters(), weight_decay=1e-3, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fault_in_a_transfer(config: dict[str, Any]) -> None:
    """The backend refuses to send a tensor, as NCCL does that is given one of a CPU."""
    if (config.get("fault") or {}).get("where") != "send":
        return
    from lightning_hybrid.comm import mesh

    make_group, count = mesh.make_group, iter(range(10**9))

    def make(store: Any, name: str, *arguments: Any) -> Any:
        handle: Any = make_group(store, name, *arguments)

        def send(*arguments: Any) -> Any:
            fault(config, "send", next(count))
            return handle._group.send(*arguments)

        if name.startswith("activations"):
            handle.send = send
        return handle

    mesh.make_group = make


def strategy(config: dict[str, Any]) -> Any:
    replicas, stages = config["replicas"], config["stages"]
    if not config["strategy"].startswith("hybrid"):
        return config["strategy"]
    from lightning_hybrid import Delayed, HybridGabraStrategy, Plan, Search, Sharded

    if config["strategy"] != "hybrid":  # by its registered name
        return config["strategy"]

    cuts = CUTS[config["network"]]
    copies = config.get("copies")  # of each stage; `stages` is the number of processes
    plan: Any = [f"net.{name}" for name in cuts.get(len(copies) if copies else stages, [])]
    plan = config.get("plan", plan)
    if devices := config.get("devices"):  # of the stages; `stages` is the number of processes
        plan = Plan(
            replicas=replicas,
            stages=len(devices),
            microbatches=config["microbatches"],
            schedule="gpipe",
            cuts=cuts[len(devices)],
            devices=devices,
            ranks=config.get("ranks", ()),
        )
    schedule = config.get("schedule", "auto")
    if schedule in DELAYED:
        schedule = Delayed(schedule, weights=config.get("delayed_weights", "stash"))
    sharded = config.get("sharded")
    return HybridGabraStrategy(
        data_parallel_size=replicas,
        pipeline_parallel_size=copies or stages,
        num_microbatches=config["microbatches"],
        start_method=config.get("start_method", "popen"),
        timeout=timedelta(seconds=config.get("timeout_s", 1800)),
        search=Search(
            capacity=config.get("capacity", "auto"), contiguous=config.get("contiguous", True)
        ),
        schedule=schedule,
        plan=plan,
        verify=config.get("verify", "auto"),
        checkpoint="full" if sharded is None else Sharded(asynchronous=sharded == "beside"),
    )


def callbacks(config: dict[str, Any], folder: Path) -> list[Callback]:
    checkpoint = config.get("checkpoint")
    saving = [ModelCheckpoint(folder / "checkpoints", **checkpoint)] if checkpoint else []
    return [Failing(), *saving]


def make_trainer(config: dict[str, Any], folder: Path) -> Trainer:
    return Trainer(
        strategy=strategy(config),
        accelerator="cpu",
        devices=config["replicas"] * config["stages"] // config.get("nodes", 1),
        num_nodes=config.get("nodes", 1),
        max_steps=config["steps"],
        max_epochs=-1,
        default_root_dir=folder,
        callbacks=callbacks(config, folder),
        logger=[Ended()] if config.get("logger") else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[resolve_name(name)() for name in config.get("environments", [])],
        **config.get("trainer", {}),
    )


def observed(trainer: Trainer, module: Classifier) -> dict[str, Any]:
    """What the lines of a script after `fit` may look at."""
    pickle.dumps(trainer.strategy)
    ranks = getattr(trainer.strategy, "_ranks", None)
    return {
        "pid": os.getpid(),
        "losses": list(module.losses),
        "weights": deepcopy(module.state_dict()),
        "forwards": Counter(module.forwards),
        "gradients": Counter(module.gradients),
        "metrics": dict(trainer.callback_metrics),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "best": trainer.checkpoint_callback and trainer.checkpoint_callback.best_model_path,
        "plan": str(getattr(trainer.strategy, "plan", None)),
        "coordinates": str(getattr(trainer.strategy, "coordinates", "")),
        "cluster": ranks and getattr(ranks.world, "cluster", None),
    }


def train(config: dict[str, Any], folder: Path) -> tuple[Trainer, dict[str, Any]]:
    """Train, and go on as the configuration says."""
    seed_everything(config.get("seed", 0), verbose=False)
    module = Classifier(config)
    options = {
        "batch_size": config["batch"],
        "num_workers": config.get("loader_processes", 0),
        # Python's fork is not made for programs with threads, and its other ways are slow
        "multiprocessing_context": (
            config.get("loader_start", "fork") if config.get("loader_processes") else None
        ),
    }
    training = (Loader if config.get("goes_on") else DataLoader)(data(config), **options)
    loader = DataLoader(data(config), **options)
    trainer = make_trainer(config, folder)
    if config.get("saves_on_signal"):  # as Lightning does for SLURM
        path = folder / "signal.ckpt"
        signal.signal(signal.SIGUSR1, lambda *_: trainer.save_checkpoint(path))
    trainer.fit(module, training, loader, ckpt_path=config.get("ckpt_path"))
    seen = observed(trainer, module)
    if config.get("after"):
        seen["validation"] = trainer.validate(module, loader, verbose=False)
        seen["test"] = trainer.test(module, loader, verbose=False)
        seen["predictions"] = trainer.predict(module, loader, ckpt_path=config["after"])
        seen["random"] = torch.rand(3)
    if config.get("slow_prediction_s"):
        seen["predictions"] = trainer.predict(module, loader)
    if config.get("again"):
        trainer.fit_loop.epoch_loop.max_steps += config["again"]
        trainer.fit(module, training, loader)
        seen["again"] = observed(trainer, module)
    if config.get("then"):  # another Trainer, with another configuration
        _, seen["then"] = train({**config, "then": None, **config["then"]}, folder / "then")
    return trainer, seen


def main(folder: Path) -> None:
    # a shell starts background jobs with Ctrl-C switched off
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = json.loads((folder / "config.json").read_text())
    fault_in_a_transfer(config)
    if config.get("default_group"):
        torch.distributed.init_process_group("gloo")
    trainer, seen = train(config, folder)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    torch.save(seen, folder / f"rank{environment.global_rank() if environment else 0}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
