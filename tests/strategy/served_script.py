"""``python served_script.py FOLDER WHAT``: scripts with one replica, which run once.

FOLDER gets ``runs``, a line for each run of this file, and ``seen.pt``. There is no guard.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import operators_of_served
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraFabricStrategy, HybridGabraStrategy
from lightning_hybrid.comm.protocol import ReadWeights
from lightning_hybrid.driver.commands import Workers
from lightning_hybrid.planning import Sizes
from lightning_hybrid.process import Children
from lightning_hybrid.remote import is_deferred
from lightning_hybrid.strategy import agreed_sizes


@torch.library.custom_op("served_script::negate", mutates_args=())
def negate(x: Tensor) -> Tensor:
    return -x


negate.register_fake(torch.empty_like)
negate.register_autograd(lambda ctx, gradient: -gradient)


class Net(nn.Module):
    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        # (such a layer keeps a list of its own weights, whose memory is freed on the driver)
        self.middle, self.last = nn.GRU(8, 8), nn.Linear(8, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.middle(self.norm(torch.tanh(self.first(x))).unsqueeze(0))
        x = x.squeeze(0)
        return self.last(x if self.between is None else self.between(x))


class Module(LightningModule):
    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.net, self.heard, self.fails = Net(between).double(), [], False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fails and batch_idx == 1:
            raise ValueError("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4)


def trainer(folder: Path, devices: int, **more: Any) -> Trainer:
    sizes = {"pipeline_parallel_size": devices, "num_microbatches": 1}
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HybridGabraStrategy(**{**sizes, **more}) if devices > 1 else "auto",
        default_root_dir=folder,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(folder: Path, devices: int, module: Module | None = None, **more: Any) -> dict[str, Any]:
    seed_everything(3, verbose=False)
    module, made = module or Module(), trainer(folder, devices, **more)
    made.fit(module)
    path = folder / f"of{devices}.ckpt"
    made.save_checkpoint(path)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "loss": made.callback_metrics["loss"],
        "checkpoint": torch.load(path, weights_only=True)["optimizer_states"],
        "ranks": [name for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE") if name in os.environ],
    }


def several(folder: Path) -> Any:
    """Trainers with as many devices as they like, and one after a failure.

    Workers have the script's default type from its first run on.
    """
    torch.set_default_dtype(torch.float64)
    found = [fit(folder, devices) for devices in (2, 3, 1, 2)]
    module = Module()
    module.fails = True
    try:
        fit(folder, 2, module)
    except ValueError as error:
        found.append(str(error))
    return [*found, fit(folder, 3)]


def _hooked(module: Module) -> Module:
    def halve(gradient: Tensor) -> Tensor:
        module.heard.append(gradient.norm().item())
        return gradient / 2

    module.net.first.weight.register_hook(halve)
    module.net.last.bias.register_hook(halve)
    return module


def hooks(folder: Path) -> Any:
    modules = [_hooked(Module()) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    found = [fit(folder, devices, module) for devices, module in zip((1, 2), modules)]
    return [*found, *(module.heard for module in modules)]


def operators(folder: Path) -> Any:
    """One of a module, and a function of one; one of this script."""
    found = []
    for devices in (1, 2):
        seed_everything(3, verbose=False)
        found.append(fit(folder, devices, Module(operators_of_served.halve_and_square)))
    try:
        fit(folder, 2, Module(torch.ops.served_script.negate))
    except Exception as error:
        found.append(str(error))
    return found


class OfTheScript(torch.optim.Adam):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.02)


class StepsByTheScript(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OfTheScript(self.parameters())


def optimizer(folder: Path) -> Any:
    found = []
    for devices in (1, 2):
        seed_everything(3, verbose=False)
        found.append(fit(folder, devices, StepsByTheScript()))
    return found


class Validates(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    val_dataloader = Module.train_dataloader


class MadeLater(Validates):
    """Its network is loaded in ``configure_model``; the first layers stay as they are."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.net = file, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net().double()
            self.net.load_state_dict(torch.load(self.file, mmap=True, weights_only=True))
            for parameter in self.net.first.parameters():
                parameter.requires_grad_(False)


def made_later(folder: Path) -> Any:
    """Several runs of a network of ``configure_model``, and one that goes on from a checkpoint."""
    torch.manual_seed(5)
    torch.save(Net().double().state_dict(), folder / "net.pt")
    found = []
    for devices in (1, 2):
        module = MadeLater(folder / "net.pt")
        first = fit(folder, devices, module)
        unread = is_deferred(module.net.first.weight)
        made = trainer(folder, devices)
        validated = made.validate(module, verbose=False)
        again = fit(folder, devices, module)
        other, path = MadeLater(folder / "net.pt"), folder / f"of{devices}.ckpt"
        loaded = trainer(folder, devices).validate(other, ckpt_path=path, verbose=False)
        found.append(({"runs": [first, again], "seen": [validated, loaded]}, unread))
    return found


class Large(nn.Module):
    """Layers that are worth to be left in their file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6 if n == 0 else 400, 400) for n in range(4)))
        self.last = nn.Linear(400, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layers(x)))


class LoadsLarge(Module):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.net = file, None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Large().double()
            state = torch.load(self.file, mmap=True, weights_only=True)
            self.net.load_state_dict(state, assign=True)


def from_files(folder: Path) -> Any:
    """A worker reads its large weights itself, from the file."""
    torch.manual_seed(5)
    torch.save(Large().double().state_dict(), folder / "net.pt")
    read, send = list[str](), Workers.send

    def noting(self: Workers, rank: int, command: Any) -> None:
        if isinstance(command, ReadWeights):
            read.extend(command.parts)
        send(self, rank, command)

    Workers.send = noting
    cut = ["net.layers.2"]
    found = [fit(folder, n, LoadsLarge(folder / "net.pt"), plan=cut) for n in (1, 2)]
    return found, read


def open_made_later(folder: Path) -> Any:
    """Sizes are left open, and the network is made in ``configure_model``."""
    torch.manual_seed(5)
    torch.save(Net().double().state_dict(), folder / "net.pt")
    found = []
    for devices in (1, 2):
        seed_everything(3, verbose=False)
        module = MadeLater(folder / "net.pt")
        trainer(folder, devices, pipeline_parallel_size="auto").fit(module)
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    return found


def open_evaluation(folder: Path) -> Any:
    """Sizes are left open, and nothing is trained."""

    def validated(devices: int) -> Any:
        seed_everything(3, verbose=False)
        made = trainer(folder, devices, pipeline_parallel_size="auto")
        return made.validate(Validates(), verbose=False)

    return [validated(devices) for devices in (1, 2)]


def open_prepared(folder: Path) -> Any:
    """`prepare_data` sets on rank 0 what the loader needs; the network would get two replicas."""

    class Prepares(Module):
        def prepare_data(self) -> None:
            self.data = super().train_dataloader().dataset

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.data, batch_size=4)

    made = trainer(folder, 2, pipeline_parallel_size="auto")
    made.fit(Prepares())
    return made.world_size, made.strategy.coordinates.ranks_per_replica


def open_fabric(folder: Path) -> Any:
    """Sizes are left open under Fabric."""

    def train(fabric: Fabric) -> dict[str, Tensor]:
        model = Net().double()
        model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
        for x, y in Module().train_dataloader():
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    def trained(devices: int) -> Any:
        seed_everything(3, verbose=False)
        strategy = HybridGabraFabricStrategy(num_microbatches=1) if devices > 1 else "auto"
        return Fabric(accelerator="cpu", devices=devices, strategy=strategy).launch(train)

    return [trained(devices) for devices in (1, 2)]


def replicas(folder: Path) -> Any:
    fit(folder, 2)
    try:
        trainer(folder, 2, data_parallel_size=2, pipeline_parallel_size=1).fit(Module())
    except Exception as error:
        return str(error)


def kill_server(folder: Path) -> Any:
    class Killed(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                os.kill(Children.processes[0].pid, signal.SIGKILL)

    fit(folder, 2, Killed())


def kill_driver(folder: Path) -> Any:
    class Killed(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                (folder / "servers").write_text(f"{Children.processes[0].pid}")
                os.kill(os.getpid(), signal.SIGKILL)

    fit(folder, 2, Killed())


def _checkpointed(folder: Path, devices: int, **sizes: int | str) -> Any:
    """Weights and metrics of a fit, and the place of its checkpoint, on each driver."""
    seed_everything(3, verbose=False)
    module = Module()
    made = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=HybridGabraStrategy(num_microbatches=1, **sizes),
        max_epochs=2,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    made.fit(module)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    place = made.checkpoint_callback.last_model_path
    shape = made.world_size, made.strategy.coordinates.ranks_per_replica
    return {"weights": weights, "loss": made.callback_metrics["loss"]}, place, shape


def open_replicas(folder: Path) -> Any:
    """Open sizes become two replicas, stay so in an evaluation, and then they are given."""
    chosen = _checkpointed(folder, 2)
    evaluates = trainer(folder, 2, pipeline_parallel_size="auto")
    evaluates.validate(Validates(), verbose=False)
    assert evaluates.world_size == 2
    return chosen, _checkpointed(folder, 2, data_parallel_size=2, pipeline_parallel_size=1)


def open_rows(folder: Path) -> Any:
    """As if two replicas of two stages were the fastest."""
    agreed_sizes.choose_on_rank_0 = lambda *_: Sizes(replicas=2, stages=2, microbatches=1)
    chosen = _checkpointed(folder, 4)
    return chosen, _checkpointed(folder, 4, data_parallel_size=2, pipeline_parallel_size=2)


def open_after_failure(folder: Path) -> Any:
    """A run fails on rank 0 alone before sizes are chosen, and another one follows."""

    class Fails(Module):
        def prepare_data(self) -> None:
            raise OSError("on purpose")

    try:
        trainer(folder, 2, pipeline_parallel_size="auto").fit(Fails())
    except OSError:
        made = trainer(folder, 2, pipeline_parallel_size="auto")
    made.fit(Module())
    return made.world_size, made.strategy.coordinates.ranks_per_replica


def late_failure(folder: Path) -> Any:
    class Fails(Module):
        def setup(self, stage: str) -> None:
            if os.environ.get("LOCAL_RANK", "0") != "0":
                raise ValueError("on purpose, late")

    try:
        trainer(folder, 2, pipeline_parallel_size="auto").fit(Fails())
    except ValueError as error:
        return str(error)


def late_death(folder: Path) -> Any:
    class Dies(Module):
        def setup(self, stage: str) -> None:
            if os.environ.get("LOCAL_RANK", "0") != "0":
                os._exit(3)

    trainer(folder, 2, pipeline_parallel_size="auto").fit(Dies())


place = Path(sys.argv[1])
with (place / "runs").open("a") as runs:
    runs.write(f"{os.getpid()}\n")
seen = globals()[sys.argv[2]](place)
rank = os.environ.get("LOCAL_RANK", "0")
torch.save(seen, place / f"seen{rank}.pt")
