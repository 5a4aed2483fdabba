"""Small LightningModules, each with one habit of users: ``python user_code_script.py FOLDER``.

They are trained one after the other, by a Trainer each, in the same processes. FOLDER holds
``config.json``; each rank leaves there what it has seen, as ``rank<N>.pt``.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 6
SEED = 7


class Layers(nn.Module):
    """Three linear layers with a skip connection around the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) + x)


class Case(LightningModule):
    """A classifier; the cases change one thing each.

    Attributes:
        options: arguments of the Trainer.
        microbatches: of the hybrid runs.
        cuts: names of the first modules of the later stages, for 2 and 3 stages.
        seen: what the driver notes in each step.
    """

    options: ClassVar[dict[str, Any]] = {}
    microbatches = 2
    samples = 16
    cuts: ClassVar[dict[int, list[str]]] = {
        2: ["net.second"],
        3: ["net.second", "net.third"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.build()
        self.double()
        self.seen: list[Any] = []
        self.gradients: Counter[str] = Counter()

    def build(self) -> None:
        self.net = Layers()

    def setup(self, stage: str) -> None:
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self.got_gradient, name))

    def got_gradient(self, name: str, _: Tensor) -> None:
        self.gradients.update([name])

    def train_dataloader(self) -> DataLoader:
        """Batches of 4; with several replicas each takes every R-th batch."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (self.samples,), generator=generator)
        indices = torch.arange(self.samples).split(4)
        mine = indices[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(TensorDataset(x, y), batch_sampler=[part.tolist() for part in mine])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.seen.append(loss.item())
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Plain(Case):
    """Nothing unusual."""


class CallsItself(Case):
    cuts: ClassVar = {2: ["second"]}

    def build(self) -> None:
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)


class ReturnsDict(Case):
    class Net(Layers):
        def forward(self, x: Tensor) -> dict[str, Any]:
            hidden = torch.tanh(self.first(x))
            return {"hidden": hidden, "heads": (self.third(torch.tanh(self.second(hidden))),)}

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        penalty = 0.1 * output["hidden"].square().mean()
        return nn.functional.cross_entropy(output["heads"][0], y) + penalty


@dataclass
class Scores:
    logits: Tensor
    hidden: Tensor


class ReturnsDataclass(Case):
    class Net(Layers):
        def forward(self, x: Tensor) -> Scores:
            hidden = torch.tanh(self.first(x))
            return Scores(self.third(torch.tanh(self.second(hidden))), hidden)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        return nn.functional.cross_entropy(output.logits, y) + output.hidden.square().mean()


class ChangesSize(Case):
    """Another crop in every other step: a graph of its own, cut at the same place."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(1) / x.shape[1]

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1, 3 + 2 * (len(self.seen) % 2), dtype=x.dtype)
        return nn.functional.cross_entropy(self.net(x[:, None] * scale[:, None]), y)


class CheckpointsActivations(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = checkpoint(lambda x: self.net(x).tanh(), x, use_reentrant=False)
        return nn.functional.cross_entropy(output, y)


class KeywordArguments(Case):
    class Net(Layers):
        def forward(self, x: Tensor, *, weight: Tensor, scale: float = 1.0) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(x)) * weight[:, None] * scale)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x=x, scale=0.5, weight=y + 1.0), y)


class CallsTwice(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        cross_entropy = nn.functional.cross_entropy
        return cross_entropy(self.net(x), y) + cross_entropy(self.net(x.flip(1)), y)


class CallsWithoutGradient(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.net(x.flip(1)).softmax(1)
        output = self.net(x)
        distance = (output.softmax(1) - target).square().mean()
        return nn.functional.cross_entropy(output, y) + distance


class DropsAnOutput(Case):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.net(x.flip(1))
        return super().loss(x, y)


class SkipsAStep(Case):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class WantsInputGradient(Case):
    """Once by `torch.autograd.grad`, which must leave no gradients, once as a leaf."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        [direction] = torch.autograd.grad(super().loss(x, y), x)
        self.seen.append(direction.clone())
        self.leaf = (x + 0.1 * direction.sign()).detach().requires_grad_()
        return super().loss(self.leaf, y)

    def on_after_backward(self) -> None:
        self.seen.append(self.leaf.grad.clone())


class HasTemperature(Case):
    def build(self) -> None:
        super().build()
        self.temperature = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x) / self.temperature, y)


class FreezesLayers(Case):
    """One parameter of each stage."""

    def build(self) -> None:
        super().build()
        self.net.first.weight.requires_grad_(False)
        self.net.third.bias.requires_grad_(False)


class FreezesAStage(Case):
    def build(self) -> None:
        super().build()
        self.net.first.requires_grad_(False)


class ClipsNorm(Case):
    options: ClassVar = {"gradient_clip_val": 0.3}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.net.third.weight.grad.clone())


class ClipsValue(Case):
    options: ClassVar = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


class Accumulates(Case):
    options: ClassVar = {"accumulate_grad_batches": 2}


class StepsByHand(Case):
    """Two optimizers, two backward passes through one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        early, late = self.optimizers()
        early.zero_grad()
        late.zero_grad()
        output = self.net(x)
        loss = nn.functional.cross_entropy(output, y)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.1 * output.square().mean())
        self.seen.append(loss.item())
        late.step()
        early.step()

    def configure_optimizers(self) -> Any:
        early = torch.optim.SGD(self.net.first.parameters(), lr=0.1)
        rest = [*self.net.second.parameters(), *self.net.third.parameters()]
        return [early, torch.optim.AdamW(rest, lr=0.01)]


class LastBatchIsSmaller(Case):
    samples = 11


class ShufflesSamples(Case):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(super().train_dataloader().dataset, batch_size=4, shuffle=True)


class ChainsNetworks(Case):
    """A network behind a network: the second's input gradient is the first's output's."""

    cuts: ClassVar = {2: ["encoder.2", "net.second"]}

    def build(self) -> None:
        super().build()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(self.encoder(x), y)


class Drops(Case):
    """Random layers in both stages, and a random number of the user's own beside them."""

    cuts: ClassVar = {2: ["net.3"], 3: ["net.3", "net.6"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.Tanh(), nn.Dropout(0.3))]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + 0.1 * torch.randn_like(x), y)


class NormalizesBatches(Case):
    cuts: ClassVar = {2: ["net.3"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))


CASES = {case.__name__: case for case in Case.__subclasses__()}


def fit(
    name: str, folder: Path, prepare: Callable[[Case], None] = lambda _: None, **options: Any
) -> Case:
    """Train one case, from the same start everywhere."""
    seed_everything(SEED, verbose=False)
    module = CASES[name]()
    prepare(module)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS * (2 if name == "StepsByHand" else 1),  # counts steps of both optimizers
        max_epochs=-1,
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**CASES[name].options, **options},
    )
    trainer.fit(module)
    module.trainer = None
    return module


def main(folder: Path) -> None:
    from lightning_hybrid import HybridGabraStrategy

    config = json.loads((folder / "config.json").read_text())
    replicas, stages = config["replicas"], config["stages"]
    rank = os.environ.get("LOCAL_RANK", "0")
    seen = {}
    for name in config["cases"]:
        strategy = HybridGabraStrategy(
            replicas,
            stages,
            num_microbatches=CASES[name].microbatches,
            allocation=CASES[name].cuts[stages],
        )
        module = fit(name, folder, strategy=strategy, devices=replicas * stages)
        seen[name] = {
            "seen": module.seen,
            "weights": module.state_dict(),
            "gradients": module.gradients,
            "pid": os.getpid(),
        }
    torch.save(seen, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
