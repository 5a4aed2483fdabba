"""One rank of a part of `first_gpu_run.py`: ``python _gpu_parts.py FOLDER``.

FOLDER holds ``config.json``; the rank leaves there what it has found, as ``rank<N>.json``.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from _gpu_steps import steps
from _timing import Module, Repeated, bare_trainer
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import BySpeed, Equal, HybridGabraStrategy, Search, Sharded
from lightning_hybrid.stage.engine import Engine
from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    seed_number_of,
)

SEED, STEADY = 0, 8
"""``STEADY``: how many steps come before those that are looked at. (Calls 1, 2, 4, 8 and 16 of a
network are checked, for which its weights are fetched.)"""


class Normalised(nn.Module):
    """Convolutions with batch statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(4):
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class Encoder(nn.Module):
    """A transformer encoder over vectors, with one number for each class at the end."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def perceptron(width: int, dropout: float = 0.0) -> nn.Module:
    inner: list[nn.Module] = []
    for _ in range(8):
        inner += [nn.Linear(width, width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*inner, nn.Linear(width, 2))


def resattnet() -> nn.Module:
    from models import ResAttNet3D  # wants what the extra `adni` installs

    return ResAttNet3D(18)


@dataclass(frozen=True)
class Case:
    """A network and the shape of a sample, for GPUs and for a quick look on CPUs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    quick: Callable[[], nn.Module]
    quick_shape: tuple[int, ...]


CASES = {
    "perceptron": Case(lambda: perceptron(1024), (1024,), lambda: perceptron(16), (16,)),
    "dropout": Case(lambda: perceptron(1024, 0.3), (1024,), lambda: perceptron(16, 0.3), (16,)),
    "batch norm": Case(lambda: Normalised(64), (3, 64, 64), lambda: Normalised(4), (3, 8, 8)),
    "transformer": Case(
        lambda: Encoder(768, 12), (256, 768), lambda: Encoder(32, 2), (8, 32)
    ),
    "3D-ResAttNet": Case(resattnet, (1, 64, 64, 64), resattnet, (1, 40, 40, 40)),
}  # fmt: skip


def network_of(config: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    case = CASES[config["network"]]
    torch.manual_seed(SEED)
    if config["quick"]:
        return case.quick(), case.quick_shape
    return case.make(), case.shape


def places(config: dict[str, Any]) -> dict[str, int]:
    """Of all ranks, for the Trainer: each of those that share a GPU is a host of its own."""
    ranks: int = config["ranks"]
    return {"devices": 1, "num_nodes": ranks} if config["shared"] else {"devices": ranks}


def hybrid(config: dict[str, Any]) -> HybridGabraStrategy:
    return HybridGabraStrategy(
        data_parallel_size=1,
        pipeline_parallel_size=config["ranks"],
        num_microbatches=config["microbatches"],
    )


# ---------------------------------------------------------------- exactness


class InParts(nn.Module):
    """A network on one device, each micro-batch with the random numbers that it has in a pipeline.

    Args:
        network: the network.
        parts: number of micro-batches.
    """

    def __init__(self, network: nn.Module, parts: int) -> None:
        super().__init__()
        self.network, self.parts, self.steps = network, parts, 0

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for number, part in enumerate(x.chunk(self.parts)):
            seed = microbatch_seed(SEED, 0, seed_number_of(self.steps, 0), number)
            with generators_of_microbatch(seed, x.device):
                outputs.append(self.network(part))
        self.steps += 1
        return torch.cat(outputs)


class Observed(Module):
    """Keeps its losses."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def exactness(config: dict[str, Any]) -> dict[str, Any]:
    """Train two stages, and then one device twice."""
    # one device is compared with itself too: what it does not repeat says nothing of the stages
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    precision = {"float64": "64-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[
        config["precision"]
    ]

    def trained(strategy: Any, place: dict[str, int], parts: int) -> dict[str, Tensor]:
        seed_everything(SEED, verbose=False)
        network, shape = network_of(config)
        module = Observed(InParts(network, parts) if parts else network)
        options: Any = {"max_steps": config["steps"], "precision": precision}
        trainer = bare_trainer(strategy, config["accelerator"], **place, **options)
        trainer.fit(module, Repeated(shape, config["batch"], config["steps"]).loader())
        losses = torch.tensor([loss.item() for loss in module.losses])
        state = {
            name: value.detach().cpu().double() for name, value in network.state_dict().items()
        }
        return {"losses": losses.double(), **state}

    strategy = hybrid(config)
    found = trained(strategy, places(config), 0)
    if rank():
        return {}
    assert strategy.plan is not None
    parts = strategy.plan.microbatches  # one, where the batch must go through whole
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # from here on one device
    one, again = (trained("auto", {"devices": 1}, parts) for _ in range(2))
    return {
        "micro-batches": parts,
        "losses": found["losses"].tolist(),
        "losses of one device": one["losses"].tolist(),
        "two stages beside one device": furthest(found, one),
        "one device beside itself": furthest(again, one),
    }


@dataclass(frozen=True)
class Shape:
    """Replicas, stages, and arguments of the strategy."""

    replicas: int
    stages: int
    arguments: dict[str, Any]


HALF = {"replicas": BySpeed(), "search": Search(capacity=[1.0, 0.5, 1.0, 0.5])}
SHAPES = {
    "three stages": Shape(1, 3, {}),
    "two replicas of two stages": Shape(2, 2, {}),
    "unequal shares": Shape(2, 2, HALF),
    "divided states": Shape(2, 2, {"replicas": Equal(shard_states=True)}),
    "sharded checkpoint": Shape(2, 2, {"checkpoint": Sharded()}),
    "looped": Shape(1, 2, {"schedule": "looped"}),
    "zero bubble": Shape(1, 2, {"schedule": "zero_bubble"}),
    "recomputed": Shape(1, 2, {"recompute": True}),
    "compiled": Shape(1, 2, {"compile_stages": True}),
}


class Counted(Observed):
    """Notes which samples it has seen."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        layers = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh())]
        super().__init__(nn.Sequential(*layers, nn.Linear(32, 2)).double())
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def shapes(config: dict[str, Any]) -> dict[str, Any]:
    """Two epochs in another shape, each step with the samples of all replicas beside one device;
    then the second epoch again from a checkpoint.
    """
    shape, folder = SHAPES[config["shape"]], Path(sys.argv[1])
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(48, 32, generator=generator, dtype=torch.float64)
    y, numbers = torch.randint(2, (48,), generator=generator), torch.arange(48)

    def trained(checkpoint: str | None = None) -> Counted:
        strategy = HybridGabraStrategy(
            data_parallel_size=shape.replicas,
            pipeline_parallel_size=shape.stages,
            num_microbatches=2,
            **shape.arguments,
        )
        saves = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, monitor=None)
        options: Any = {"max_epochs": 2, "callbacks": [saves], "enable_checkpointing": True}
        module = Counted()
        trainer = bare_trainer(strategy, config["accelerator"], **places(config), **options)
        trainer.fit(module, DataLoader(TensorDataset(x, y, numbers), 8), ckpt_path=checkpoint)
        return module

    module = trained()
    resumed = trained(f"{folder / 'epoch=0.ckpt'}")
    (folder / f"seen{rank()}.json").write_text(json.dumps(module.seen))
    if rank():
        return {}
    alone, steps = Counted().to(module.device), samples_of_steps(folder, config["ranks"])
    optimizer = alone.configure_optimizers()
    for samples in steps:
        optimizer.zero_grad()
        batch = x[samples].to(module.device), y[samples].to(module.device)
        nn.functional.cross_entropy(alone.net(batch[0]), batch[1]).backward()
        optimizer.step()
    found, again, expected = (
        {name: value.detach().cpu() for name, value in each.net.state_dict().items()}
        for each in (module, resumed, alone)
    )
    return {
        "steps": len(steps),
        "beside one device": max(_share(found[n], value) for n, value in expected.items()),
        "resumed beside not": max(_share(again[n], value) for n, value in found.items()),
    }


def samples_of_steps(folder: Path, ranks: int) -> list[list[int]]:
    """What all replicas have seen in each step. (Workers note what their driver does.)"""
    files = [folder / f"seen{number}.json" for number in range(ranks)]
    while not all(file.is_file() and file.read_text() for file in files):
        time.sleep(0.05)
    seen = {file.read_text() for file in files}
    return [sorted(chain.from_iterable(step)) for step in zip(*map(json.loads, seen))]


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """Where two trainings differ most, as a share of the largest number of that tensor.

    Shares are between 0 and 2, which also stands for numbers that are not finite.
    """
    shares = {name: _share(found[name], value) for name, value in expected.items()}
    worst = max(shares, key=lambda name: shares[name])
    return {"losses": shares["losses"], "worst": shares[worst], "tensor": worst}


def _share(found: Tensor, expected: Tensor) -> float:
    largest = max(float(found.abs().max()), float(expected.abs().max()))
    share = float((found - expected).abs().max()) / (largest or 1.0)
    return share if share <= 2.0 else 2.0  # (no comparison with NaN holds)


# ---------------------------------------------------------------- what engines do


def watch_passes(each: Callable[[int, str], None]) -> None:
    """Have ``each`` called before every pass of an engine, with its number and kind."""
    count: Counter[str] = Counter()
    for kind in ("forward", "backward"):
        whole = getattr(Engine, kind)

        def watched(*given: Any, kind: str = kind, whole: Any = whole, **named: Any) -> Any:
            each(count[kind], kind)
            count[kind] += 1
            return whole(*given, **named)

        setattr(Engine, kind, watched)


def train(config: dict[str, Any]) -> HybridGabraStrategy:
    seed_everything(SEED, verbose=False)
    network, shape = network_of(config)
    strategy = hybrid(config)
    trainer = bare_trainer(
        strategy, config["accelerator"], **places(config), max_steps=config["steps"]
    )
    trainer.fit(Observed(network), Repeated(shape, config["batch"], config["steps"]).loader())
    return strategy


def endless(config: dict[str, Any]) -> dict[str, Any]:
    """Train until this rank is killed, or hears that another one is."""
    folder = Path(sys.argv[1])

    def at(number: int, kind: str) -> None:
        if number == STEADY:
            (folder / f"trains{rank()}").touch()

    watch_passes(at)
    train(config | {"steps": 10**9})
    return {}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "exactness": exactness,
    "shapes": shapes,
    "killed": endless,
    "steps": lambda config: steps(config, places(config)),
}


def rank() -> int:
    return int(os.environ["PART_RANK"])


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if config["accelerator"] == "cpu":
        torch.set_num_threads(1)
    found = KINDS[config["kind"]](config)
    (folder / f"rank{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
