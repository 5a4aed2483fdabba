"""A user's script on emulated GPUs: ``python trainer_script.py FOLDER``.

FOLDER holds ``config.json``; each rank leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import emulated_cuda

if __name__ == "__main__":
    emulated_cuda.emulate()

import emulated_nccl
import torch
from emulated_cuda import EVENTS
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.run import building
from lightning_hybrid.stage.engine import Engine
from models import ResAttNet3D

BATCH = 4


class Encoder(nn.Module):
    """A transformer with dropout, and one number for each class."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class Loses(Encoder):
    """Computes its loss, where there are targets."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.head(self.layers(x).mean(1))
        return logits if y is None else nn.functional.cross_entropy(logits, y)


class Prints(Encoder):
    """Cut between two graphs, since TorchDynamo follows no ``print``."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers.layers[0](x)
        print(end="")
        return self.head(self.layers(x).mean(1))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "resattnet": (lambda: ResAttNet3D(18), (1, 24, 24, 24)),
    "transformer": (Encoder, (5, 16)),
    "prints": (Prints, (5, 16)),
    "loss inside": (Loses, (5, 16)),
}


class Classifier(LightningModule):
    """Trains a network in float64.

    Args:
        network: its name.
    """

    def __init__(self, network: str) -> None:
        super().__init__()
        self.net = NETWORKS[network][0]().double()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        inside = isinstance(self.net, Loses)
        loss = self.net(x, y) if inside else nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Looks(Classifier):
    """The same, by one who validates, and looks at weights and gradients of all layers."""

    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.found.append(nn.functional.cross_entropy(self.net(x), y).item())
        assert {p.device for p in self.parameters()} == {x.device}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert {p.device for p in self.parameters()} == {batch[0].device}
        return loss + 0.01 * sum(p.square().sum() for p in self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        assert {g.device for g in gradients} == {self.device}
        self.found.append(torch.stack([g.norm() for g in gradients]).norm().item())

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(sum(p.abs().sum().item() for p in self.parameters()))


def samples(network: str, steps: int, replicas: int = 1) -> TensorDataset:
    """All that is trained on."""
    count = steps * BATCH * replicas
    generator = torch.Generator().manual_seed(1)
    shape = (count, *NETWORKS[network][1])
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 2, (count,), generator=generator))


def made(network: str, kind: type[Classifier] = Classifier) -> Classifier:
    seed_everything(0, verbose=False)
    return kind(network)


def waits() -> int:
    """How often the host has waited for a device until now."""
    return sum(n for (kind, _), n in EVENTS.counts.copy().items() if kind in emulated_cuda.WAITS)


def watch_engines(seen: list[list[tuple[str, str]]], steps: list[int]) -> None:
    """Note what each pass of an engine has the host wait for.

    Args:
        seen: gets it.
        steps: gets the number of all waits until each forward pass.
    """
    for name in ("forward", "backward"):
        whole = getattr(Engine, name)

        def watched(*arguments: Any, name: str = name, whole: Any = whole, **options: Any) -> Any:
            if name == "forward":
                steps.append(waits())
            with EVENTS.during() as events:
                result = whole(*arguments, **options)
            seen.append([event for event in events if event[0] in emulated_cuda.WAITS])
            return result

        setattr(Engine, name, watched)


def main(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    emulated_nccl.emulate()
    passes: list[list[tuple[str, str]]] = []
    steps: list[int] = []
    watch_engines(passes, steps)
    if config["waits"]:
        building.with_room_for = lambda *_: torch.device("cpu")
    replicas, stages, network = config["replicas"], config["stages"], config["network"]
    module = made(network, Looks if config["looks"] else Classifier)
    trainer = Trainer(
        strategy=HybridGabraStrategy(
            data_parallel_size=replicas,
            pipeline_parallel_size=stages,
            num_microbatches=config["microbatches"],
            schedule=config["schedule"],
            **config["strategy"],
        ),
        accelerator="gpu",
        devices=replicas * stages,
        max_steps=config["steps"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **config["trainer"],
    )
    loader = DataLoader(samples(network, config["steps"], replicas), batch_size=BATCH)
    trainer.fit(module, loader, loader if config["looks"] else None)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    found = {
        "device": str(module.device),
        "losses": [loss.item() for loss in module.losses],
        "found": getattr(module, "found", []),
        "weights": {name: value.cpu() for name, value in module.state_dict().items()},
        "passes": passes,
        "waits": [after - before for before, after in pairwise(steps)],
        "peak": [torch.cuda.max_memory_allocated(n) for n in range(emulated_cuda.DEVICES)],
    }
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
