"""What users do with networks, losses and optimizers inside their LightningModule."""

from dataclasses import dataclass
from typing import Any, ClassVar

import places
import torch
from suite import ONE_OF_THREE, ONE_OF_TWO, STEPS, TWO_OF_TWO, Layers, Record, Row
from torch import Tensor, nn
from torch.utils.data import DataLoader

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


class Plain(Row):
    """Calls `self.net(x)` in `training_step`, and nothing unusual."""

    fast = True
    shapes = EVERY


class CallsItself(Row):
    """Calls `self(x)`: the LightningModule is the network."""

    sampled = True
    cuts: ClassVar = {2: ["second"]}

    def build(self) -> None:
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)


class ReturnsDict(Row):
    """The network returns a dictionary with a tuple in it."""

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


class ReturnsDataclass(Row):
    """The network returns a dataclass."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Scores:
            hidden = torch.tanh(self.first(x))
            return Scores(self.third(torch.tanh(self.second(hidden))), hidden)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        return nn.functional.cross_entropy(output.logits, y) + output.hidden.square().mean()


class ChangesSize(Row):
    """Another crop in every other step: a graph of its own, cut at the same place."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(1) / x.shape[1]

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1, 3 + 2 * (len(self.seen) % 2), dtype=x.dtype)
        return nn.functional.cross_entropy(self.net(x[:, None] * scale[:, None]), y)


class KeywordArguments(Row):
    """Calls the network with keyword arguments."""

    class Net(Layers):
        def forward(self, x: Tensor, *, weight: Tensor, scale: float = 1.0) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(x)) * weight[:, None] * scale)

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x=x, scale=0.5, weight=y + 1.0), y)


class CallsTwice(Row):
    """Calls the network twice in a step."""

    fast = True

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        cross_entropy = nn.functional.cross_entropy
        return cross_entropy(self.net(x), y) + cross_entropy(self.net(x.flip(1)), y)


class CallsWithoutGradient(Row):
    """Calls the network under `torch.no_grad()` in a training step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.net(x.flip(1)).softmax(1)
        output = self.net(x)
        distance = (output.softmax(1) - target).square().mean()
        return nn.functional.cross_entropy(output, y) + distance


class DropsAnOutput(Row):
    """Drops an output, which never gets a backward."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.net(x.flip(1))
        return super().loss(x, y)


class SkipsAStep(Row):
    """Returns `None` from `training_step`, which skips the step."""

    shapes = (ONE_OF_TWO, ONE_OF_THREE)  # with several replicas Lightning itself refuses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class ReadsStatisticsOfABatchThatIsSkipped(Row):
    """Reads statistics of batch norm after a step that was skipped: they have seen the batch, the
    last one too.
    """

    sampled = True
    microbatches = 1
    # replicas have running statistics of their own until something reads them (see the docs)
    shapes = (ONE_OF_TWO, ONE_OF_THREE)
    options: ClassVar[dict[str, Any]] = {"max_steps": -1, "max_epochs": 2}
    cuts: ClassVar[dict[int, list[str]]] = {2: ["net.3"], 3: ["net.3", "net.6"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(self.net[1].running_mean.clone())
        return None if batch_idx == 3 else loss


class WantsInputGradient(Row):
    """Takes the gradient of an input, by `torch.autograd.grad` or as a leaf."""

    sampled = True

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        [direction] = torch.autograd.grad(super().loss(x, y), x)
        self.seen.append(direction.clone())
        self.leaf = (x + 0.1 * direction.sign()).detach().requires_grad_()
        return super().loss(self.leaf, y)

    def on_after_backward(self) -> None:
        self.seen.append(self.leaf.grad.clone())

    @classmethod
    def check(cls, ranks: list[Record], reference: list[Record]) -> None:
        for rank in () if places.ON_GPU else ranks:  # (there nobody hears of gradients)
            # once per step, or per micro-batch of it, and no oftener
            [times] = set(rank["gradients"].values())
            assert times in (STEPS, STEPS * cls.microbatches)


class HasTemperature(Row):
    """A learned temperature, a parameter outside of the network."""

    def build(self) -> None:
        super().build()
        self.temperature = nn.Parameter(torch.ones(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x) / self.temperature, y)


class FreezesLayers(Row):
    """Freezes one parameter of each stage."""

    def build(self) -> None:
        super().build()
        self.net.first.weight.requires_grad_(False)
        self.net.third.bias.requires_grad_(False)


class FreezesAStage(Row):
    """Freezes all of a stage."""

    sampled = True
    idle = True

    def build(self) -> None:
        super().build()
        self.net.first.requires_grad_(False)


class ClipsNorm(Row):
    """`gradient_clip_val`: the norm over all stages."""

    options: ClassVar = {"gradient_clip_val": 0.3}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.net.third.weight.grad.clone())


class ClipsValue(Row):
    """`gradient_clip_val` with `gradient_clip_algorithm="value"`."""

    options: ClassVar = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}


class Accumulates(Row):
    """`accumulate_grad_batches=2`."""

    shapes = EVERY
    options: ClassVar = {"accumulate_grad_batches": 2}


class StepsByHand(Row):
    """Manual optimization: two optimizers, two backward passes through one graph."""

    fast = True
    options: ClassVar = {"max_steps": 2 * STEPS}  # it counts those of both optimizers

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


class LastBatchIsSmaller(Row):
    """The last batch is smaller."""

    sampled = True
    samples = 11


class ShufflesSamples(Row):
    """A loader with `shuffle=True`."""

    control = False

    def train_dataloader(self) -> DataLoader:
        return DataLoader(super().train_dataloader().dataset, batch_size=4, shuffle=True)


class ChainsNetworks(Row):
    """A network behind a network: the output of the first is the input of the second, with
    gradients.
    """

    cuts: ClassVar = {2: ["encoder.2", "net.second"]}

    def build(self) -> None:
        super().build()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(self.encoder(x), y)


class ChainsNetworksByAView(ChainsNetworks):
    """A network behind a network; what the first returns lies in memory in another order than its
    dimensions.
    """

    sampled = True
    shapes = EVERY
    cuts: ClassVar = {
        2: ["encoder.2", "net.second"],
        3: ["encoder.2", "encoder.4", "net.second", "net.third"],
    }

    class Encoder(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).unflatten(1, (2, 3)).mT

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    def build(self) -> None:
        self.net = self.Net()
        layers = [m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())]
        self.encoder = self.Encoder(*layers[:-1])


class DifferentiatesByAPartOfATensor(Row):
    """Only a part of an input requires a gradient (`x[:, :6].requires_grad_()`)."""

    sampled = True

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        part = torch.cat([x, x], 1)[:, :6].requires_grad_()
        loss = super().loss(part, y)
        (gradient,) = torch.autograd.grad(loss, part, retain_graph=True)
        self.seen.append(gradient.abs().sum().item())
        return loss


class Drops(Row):
    """Dropout in both stages, and a random number beside them.

    Each micro-batch draws from generators of its own: the numbers are the same for every number of
    stages from two on.
    """

    fast = True
    control = False
    per_microbatch = True
    shapes = EVERY
    cuts: ClassVar = {2: ["net.3"], 3: ["net.3", "net.6"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.Tanh(), nn.Dropout(0.3))]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + 0.1 * torch.randn_like(x), y)


class DropsAndRecomputes(Drops):
    """Dropout with `recompute=True`.

    The forward runs again for the backward, with the same draws.
    """

    arguments: ClassVar = {"recompute": True}


class NormalizesBatches(Row):
    """Batch norm: statistics of a micro-batch, as with gradient accumulation."""

    fast = True
    per_microbatch = True
    cuts: ClassVar = {2: ["net.3"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))


class NormalizesBatchesAndRecomputes(NormalizesBatches):
    """Batch norm with `recompute=True`: running statistics are written once per forward."""

    arguments: ClassVar = {"recompute": True}
