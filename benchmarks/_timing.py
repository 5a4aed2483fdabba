"""What the benchmarks of training steps share: volumes, a classifier, a clock."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Delayed, HybridGabraStrategy
from lightning_hybrid.process import Children
from lightning_hybrid.schedules import STREAMED


class Repeated(Dataset[tuple[Tensor, int]]):
    """The same few inputs over and over: reading is not what is measured.

    Args:
        shape: of an input.
        batch: number of different inputs, which is the size of a batch.
        steps: number of batches.
    """

    def __init__(self, shape: tuple[int, ...], batch: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(batch, *shape, generator=generator)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index % len(self.inputs)], index % 2

    def loader(self, workers: int = 0) -> DataLoader[Any]:
        """Streamed schedules want worker processes."""
        return DataLoader(self, batch_size=len(self.inputs), num_workers=workers)


def asked(schedule: str) -> Any:
    """A schedule as the strategy takes it."""
    delayed: Any = schedule in STREAMED and STREAMED[schedule].delayed and schedule
    return Delayed(delayed) if delayed else schedule


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


class Module(LightningModule):
    """A network of two classes, trained in the plainest way."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())


class Divided(Module):
    """The same on as many samples a step, however many replicas share them.

    Args:
        network: the network.
        shape: of an input.
        batch: samples of a step, on all replicas together.
        steps: number of steps.
    """

    def __init__(self, network: nn.Module, shape: tuple[int, ...], batch: int, steps: int) -> None:
        super().__init__(network)
        self.shape, self.batch, self.steps = shape, batch, steps

    def train_dataloader(self) -> DataLoader[Any]:
        replicas = self.trainer.world_size
        return Repeated(self.shape, self.batch // replicas, self.steps * replicas).loader()


def bare_trainer(strategy: Any, accelerator: str = "cpu", **options: Any) -> Trainer:
    """A Trainer that only trains: no bar, no summary; checkpoints or a logger if asked for.

    Args:
        strategy: as the Trainer takes it.
        accelerator: as the Trainer takes it.
        options: further arguments of the Trainer.
    """
    return Trainer(
        strategy=strategy,
        accelerator=accelerator,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "logger": False, **options},
    )


def servers() -> list[int]:
    """The numbers of the processes that this one has started for its other devices."""
    return [process.pid for process in Children.processes]


def computed_s(process: int) -> float:
    """Seconds that the main thread of another process has computed."""
    file = Path(f"/proc/{process}/task/{process}/schedstat")
    return int(file.read_text().split()[0]) / 1e9


def before_the_first_step(trainer: Trainer) -> dict[str, float]:
    """The seconds of each piece of work before the first step; empty: nothing was pipelined.

    (Loggers get these after the step, as ``hybrid/start/...``, which is too late for one step.)
    """
    session = getattr(trainer.strategy, "_session", None)
    spent = {} if session is None else session._run.progress.seconds
    # (the first word of a description, which ends with the name of the network)
    return {what.split()[0]: seconds for what, seconds in spent.items()}


class Clock(Callback):
    """When each step starts."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def durations(starts: list[float], warm_up: int) -> list[float]:
    """From the start of one step to the start of the next, without the first ones."""
    return [b - a for a, b in zip(starts[warm_up:], starts[warm_up + 1 :])]


def train(
    network: nn.Module, strategy: HybridGabraStrategy, inputs: Repeated, warm_up: int
) -> list[float] | None:
    """Train on two processes. Returns the seconds of each step, on rank 0."""
    clock = Clock()
    trainer = bare_trainer(
        strategy=strategy,
        devices=2,
        max_epochs=1,
        callbacks=[clock],
    )
    trainer.fit(Module(network), inputs.loader())
    return durations(clock.starts, warm_up) if trainer.is_global_zero else None
