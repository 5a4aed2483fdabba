"""State of a LightningModule that is its own network: metrics, counters, hyper-parameters.

None of it may have the network captured anew in every step, nor be lost.
"""

from collections import defaultdict, deque
from typing import Any, ClassVar

import torch
from rows_steps import _Evaluated
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


class _Own(Row):
    """`self(x)`."""

    captures = 2
    cuts: ClassVar = {2: ["second"], 3: ["second", "third"]}

    def build(self) -> None:
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) + x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        self.note(output.detach(), y)
        loss = cross_entropy(output, y)
        self.seen.append(loss.item())
        return loss

    def note(self, output: Tensor, y: Tensor) -> None:
        """What changes the state of the module between two calls."""


# ---------------------------------------------------------------- metrics


class MeasuresItself(_Own):
    """Metric objects of torchmetrics on a LightningModule that is the network. Logged by object."""

    shapes = EVERY

    def build(self) -> None:
        super().build()
        self.accuracy = MulticlassAccuracy(3)
        self.several = MetricCollection([MulticlassConfusionMatrix(3)])

    def note(self, output: Tensor, y: Tensor) -> None:
        self.accuracy(output, y)
        self.several.update(output, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.seen.append({name: value.clone() for name, value in self.several.compute().items()})
        self.several.reset()


class MeasuresInForward(_Own):
    """A metric object is updated within `forward`, once per call."""

    sampled = True
    equal_or_refused = ("Data-dependent branching", "fewer than 3 stages")  # the parts between
    works = (ONE_OF_TWO, TWO_OF_TWO)

    def build(self) -> None:
        super().build()
        self.size = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.size.update(x.detach().abs().mean())
        return self.third(torch.tanh(self.second(x)) + x)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.size.compute().item())

    captures = None


class MeasuresTrainingAndValidation(_Evaluated):
    """Metrics of training and validation in a `ModuleDict`."""

    cuts: ClassVar = _Own.cuts
    captures = 4  # with and without gradients

    def build(self) -> None:
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        names = ("on_train", "on_val")
        self.metrics = nn.ModuleDict({name: MulticlassAccuracy(3) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) + x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        self.log("train", self.metrics["on_train"](output, y))
        return cross_entropy(output, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.metrics["on_val"].update(self(x), y)
        self.log("val", self.metrics["on_val"])


# ---------------------------------------------------------------- what a module keeps


class CountsSteps(_Own):
    """Counts steps in an attribute that `forward` does not read."""

    fast = True

    def note(self, output: Tensor, y: Tensor) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        self.seen.append(self.steps)


class KeepsOutputsOfTheEpoch(_Own):
    """Lists, dictionaries and queues of the LightningModule grow."""

    def build(self) -> None:
        super().build()
        self.outputs: list[Tensor] = []
        self.by_class: dict[int, list[float]] = defaultdict(list)
        self.recent: deque[float] = deque(maxlen=3)

    def note(self, output: Tensor, y: Tensor) -> None:
        self.outputs.append(output)
        self.recent.append(output.sum().item())
        for kind, value in zip(y.tolist(), output.sum(1).tolist()):
            self.by_class[kind].append(value)

    def on_train_epoch_end(self) -> None:
        self.seen.append([torch.cat(self.outputs), sorted(self.by_class), list(self.recent)])
        self.outputs.clear()


class KeepsTheBatch(_Own):
    """Keeps the batch and the last loss as attributes that `forward` does not read."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch, self.number = batch, batch_idx
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach()
        return loss


class ReadsAFloatThatChanges(_Own):
    """`forward` reads a float that changes in each step. It becomes an input of the graph."""

    sampled = True

    def build(self) -> None:
        super().build()
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.beta
        return self.third(torch.tanh(self.second(x)) + x) / (1 + self.beta)

    def note(self, output: Tensor, y: Tensor) -> None:
        self.beta *= 0.9


class ReadsACounter(ReadsAFloatThatChanges):
    """`forward` reads an integer that changes in each step. It becomes an input of the graph."""

    captures = 3  # 0 and 1 are numbers of their own to TorchDynamo

    def build(self) -> None:
        super().build()
        self.beta = 0  # type: ignore[assignment]

    def note(self, output: Tensor, y: Tensor) -> None:
        self.beta += 1


class ReadsLengthsThatChange(_Own):
    """Sequences of another length in each step."""

    shapes = EVERY
    captures = 3

    def build(self) -> None:
        self.first = nn.Linear(2, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        shares = (self.second(x) @ x.transpose(1, 2)).softmax(-1)
        return self.third((shares @ x).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        length = 2 + (5 * self.global_step) % 7
        steps = torch.linspace(0.5, 1, length, dtype=x.dtype)
        return super().training_step((x[:, None, :2] * steps[:, None], y), batch_idx)


class RunsOverLengthsThatChange(ReadsLengthsThatChange):
    """A recurrent layer over sequences of another length in each step. It is captured twice."""

    def build(self) -> None:
        super().build()
        self.second = nn.GRU(8, 8, batch_first=True)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.second(torch.tanh(self.first(x)))
        return self.third(states.mean(1))


class ReadsSizesThatChange(_Own):
    """Images of another size in each step."""

    captures = 3

    def build(self) -> None:
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.tanh(self.first(x)), 2)
        return self.third(torch.tanh(self.second(x)).mean((2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        size = 4 + 2 * (self.global_step % 4)
        image = x[:, None, :1, None] * torch.linspace(0, 1, size, dtype=x.dtype)
        image = image * torch.linspace(1, 2, size, dtype=x.dtype)[:, None]
        return super().training_step((image, y), batch_idx)


# ---------------------------------------------------------------- Lightning's methods in `forward`


class LogsInForward(_Own):
    """`self.log` and `self.log_dict` within `forward`: logged when the call is over. Where a mean
    over the batch is logged, the batch stays whole.
    """

    sampled = True
    captures = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.log("first", x.mean(), on_step=True, on_epoch=True, sync_dist=True)
        x = torch.tanh(self.second(x)) + x
        self.log_dict({"second": x.square().mean(), "step": float(self.global_step)})
        return self.third(x)


class KeepsAStateBetweenSteps(_Own):
    """Carries a detached hidden state from batch to batch."""

    captures = None
    control = True

    def build(self) -> None:
        super().build()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.state is not None:
            x = x + 0.5 * self.state
        self.state = x.detach()
        return self.third(torch.tanh(self.second(x)) + x)


class AsksTheTrainerInForward(_Own):
    """`forward` reads `self.trainer.training`, `self.device`, `self.dtype` and `self.training`."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(device=self.device, dtype=self.dtype)
        x = torch.tanh(self.first(x))
        if self.training and self.trainer.training and not self.trainer.sanity_checking:
            x = 2 * x
        return self.third(torch.tanh(self.second(x)) + x)


class ChecksItsLossWeights(_Own):
    """The steps change a tensor of class weights, an attribute."""

    captures = None

    def build(self) -> None:
        super().build()
        self.weight = torch.ones(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) + x) * self.weight

    def note(self, output: Tensor, y: Tensor) -> None:
        self.weight = 0.5 + output.softmax(1).mean(0)
