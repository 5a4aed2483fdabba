"""State that only the Python of the ranks that run the user's steps has."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


class _Scaled(Row):
    """`scale` is known to the network only once the user's hooks have run."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x)) * self.scale
            return self.third(torch.tanh(self.second(x)) * self.scale + x)

    def build(self) -> None:
        self.net = self.Net()


class SetsAnAttributeWhenFitStarts(_Scaled):
    """Sets an attribute of the network in `on_fit_start`."""

    shapes = EVERY

    def on_fit_start(self) -> None:
        self.net.scale = 0.5


class SetsATensorWhenTrainingStarts(_Scaled):
    """Computes a tensor from the loader in `on_train_start`, which the network reads."""

    def on_train_start(self) -> None:
        samples = torch.cat([x for x, _ in self.trainer.train_dataloader])
        self.net.scale = samples.std().repeat(8)


class SetsAnAttributeInACallback(_Scaled):
    """A callback sets an attribute of the network before each batch."""

    sampled = True

    class Sets(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            pl_module.net.scale = 0.5 + 0.1 * batch_idx

    def trainer_options(self, folder: Any) -> dict[str, Any]:
        return {"callbacks": [self.Sets()]}


class RegistersABufferInAHook(_Scaled):
    """Registers a buffer in a hook that only drivers run. The modules of workers lack it."""

    equal_or_refused = ("scale",)
    works = EVERY

    def on_train_start(self) -> None:
        self.net.register_buffer("scale", torch.linspace(0.5, 1, 8, dtype=torch.float64), False)


class AddsALayerInAHook(Row):
    """Adds a layer in a hook that only drivers run.

    The optimizers were made before. Its parameters are trained on the driver.
    """

    sampled = True
    shapes = (ONE_OF_TWO, ONE_OF_THREE)  # `ddp` does not know of it
    equal_or_refused = ("extra",)
    works = (ONE_OF_TWO, ONE_OF_THREE)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.extra(super().forward(x))

    def build(self) -> None:
        self.net = self.Net()

    def on_train_start(self) -> None:
        torch.manual_seed(5)
        self.net.extra = nn.Linear(3, 3, dtype=torch.float64, device=self.device)
        self.trainer.optimizers[0].add_param_group({"params": list(self.net.extra.parameters())})

    def on_train_end(self) -> None:
        self.seen.append([value.tolist() for value in self.net.extra.parameters()])

    def weights(self, run: Run) -> dict[str, Tensor]:
        """All but those that a worker's module does not have."""
        return {n: value for n, value in super().weights(run).items() if "extra" not in n}


class ReplacesTheClassOfALayerInAHook(Row):
    """Changes `layer.__class__` in `on_train_start`."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    def on_train_start(self) -> None:
        self.net.second.__class__ = self.Doubled


class UpdatesAMetricFirst(Row):
    """Updates a metric before the network's first call; the LightningModule is the network."""

    sampled = True
    shapes = EVERY
    cuts: ClassVar = {2: ["second"], 3: ["second", "third"]}

    def build(self) -> None:
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.accuracy = MulticlassAccuracy(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(x)) + x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.accuracy.update((x.sum(1) > 0).long(), y)  # a baseline
        self.seen.append(self.accuracy.compute().item())
        loss = cross_entropy(self(x), y)
        self.seen.append(loss.item())
        return loss


class ReadsTheNumberOfBatches(UpdatesAMetricFirst):
    """The network reads `self.trainer.num_training_batches` and the loader.

    Both are known on drivers alone.
    """

    def forward(self, x: Tensor) -> Tensor:
        share = 1 / self.trainer.num_training_batches + 1 / len(self.trainer.train_dataloader)
        return super().forward(x) * share


class ReadsTheBatchNumber(UpdatesAMetricFirst):
    """`training_step` sets an attribute that `forward` reads."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.number, self.labels = batch_idx, batch[1]
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.number) + 0.1 * self.labels[:, None]


class FreezesWhenTrainingStarts(Row):
    """Freezes layers in `on_train_start`, after the workers have begun to serve."""

    sampled = True
    idle = True

    def on_train_start(self) -> None:
        self.net.first.requires_grad_(False)


class ChangesModesInAHook(Row):
    """Puts a part of the network into evaluation mode before each step."""

    cuts: ClassVar = {2: ["net.3"]}

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )

    def on_train_batch_start(self, *_: Any) -> None:
        self.net[2].eval()


class DefinesAnOperatorInAHook(Row):
    """An operator that a hook registers on the driver alone: register it on all ranks."""

    equal_or_refused = ("late::double",)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ops.late.double(self.first.weight.new_ones(1) * x))

    def build(self) -> None:
        self.net = self.Net()

    def on_fit_start(self) -> None:
        if not hasattr(torch.ops.late, "double"):
            self.library().define("double(Tensor x) -> Tensor")
            self.library().impl("double", lambda x: x * 2, "CompositeImplicitAutograd")

    made: ClassVar[list[Any]] = []

    @classmethod
    def library(cls) -> Any:
        """One, for as long as the process lives."""
        if not cls.made:
            cls.made.append(torch.library.Library("late", "DEF"))
        return cls.made[0]


class FailsBeforeItsStages(Row):
    """The network raises an error in its first call: all ranks end with that error."""

    fast = True
    refused = ("ValueError", "no scale was chosen")
    control = False  # it works nowhere

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                raise ValueError("no scale was chosen")
            return super().forward(x)

    def build(self) -> None:
        self.net = self.Net()
