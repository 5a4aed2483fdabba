"""Sizes that mislead: one sample at first, other things as long as the batch, samples that meet."""

from typing import Any, ClassVar

import torch
from rows_steps import _Evaluated
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Layers, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)


class _Net(Row):
    """Its network is the row's own `Net`."""

    class Net(Layers):
        pass

    def build(self) -> None:
        self.net = self.Net()


class _Sizes(_Net):
    """Batches of given sizes, one after the other."""

    sizes: ClassVar[tuple[int, ...]] = ()

    def train_dataloader(self) -> Any:
        dataset = self.dataset(sum(self.sizes) * self.trainer.world_size)
        parts = torch.arange(len(dataset)).split(list(self.sizes) * self.trainer.world_size)
        mine = parts[self.trainer.global_rank * len(self.sizes) :][: len(self.sizes)]
        return DataLoader(dataset, batch_sampler=[part.tolist() for part in mine])


# ---------------------------------------------------------------- one sample


class ChecksSanityWithOneSample(_Evaluated):
    """The first call has one sample and no gradients (sanity check)."""

    sampled = True
    shapes = EVERY
    options: ClassVar = {"num_sanity_val_steps": 2}

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(4, seed=2), batch_size=1)


class ValidatesItselfAndTrainsItsNetwork(_Evaluated):
    """`validation_step`, which comes first, calls `self(x)`, and `training_step` calls
    `self.net(x)`. What is trained is cut.
    """

    sampled = True
    shapes = EVERY
    options: ClassVar = {"num_sanity_val_steps": 2}

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


class TrainsPartsOfWhatItValidates(_Evaluated):
    """Validation calls the whole network, training its two parts.

    A hook calls the whole without gradients before.
    """

    shapes = EVERY
    cuts: ClassVar = {2: ["net.encoder.2", "net.decoder.second"]}
    options: ClassVar = {"num_sanity_val_steps": 2}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            self.decoder = Layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x))

    def build(self) -> None:
        self.net = self.Net()

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            self.seen.append(self.net(torch.ones(4, 6, dtype=torch.float64)).sum().item())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.net.decoder(self.net.encoder(x)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class TrainsAPartFirst(_Evaluated):
    """Two steps train an encoder alone, the next ones all.

    The encoder stays as it was cut, and the rest runs on the driver.
    """

    sampled = True
    shapes = EVERY
    cuts: ClassVar = {2: ["net.encoder.2"], 3: ["net.encoder.2", "net.encoder.4"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [m for _ in range(3) for m in (nn.Linear(6, 6), nn.Tanh())]
            self.encoder, self.head = nn.Sequential(*layers), nn.Linear(6, 3)
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale * self.encoder(x))

    def build(self) -> None:
        self.net = self.Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.global_step < 2:
            return self.net.encoder(x).square().mean()
        return cross_entropy(self.net(x), y)


class TrainsOnOneSample(_Sizes):
    """Every batch has one sample."""

    sizes = (1, 1, 1, 1, 1, 1)


class StartsWithOneSample(_Sizes):
    """The first batch has one sample, later ones more."""

    fast = True
    shapes = EVERY
    sizes = (1, 4, 4, 3, 1, 2)


class EndsWithOneSample(_Sizes):
    """The last batch of each epoch has one sample."""

    sizes = (4, 4, 1)


class PredictsOneSample(_Evaluated):
    """Predicts sample by sample, and trains nothing."""

    trains = False

    def predict_dataloader(self) -> Any:
        return DataLoader(self.dataset(3, seed=3), batch_size=1)

    def exercise(self, run: Any) -> Any:
        return run.trainer().predict(self)


class NormalizesBatchesAfterOneSample(_Evaluated):
    """Batch norm after a sanity check on one sample.

    The sanity check runs in `eval` mode, and batch norm needs two samples in training.
    """

    cuts: ClassVar = {2: ["net.3"]}
    per_microbatch = True

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.BatchNorm1d(8), nn.Tanh())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(2, seed=2), batch_size=1)


class OneSampleWithoutABatch(_Net):
    """Calls the network on single vectors, without a batch dimension."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([cross_entropy(self.net(a), b) for a, b in zip(x, y)]).mean()


class OneImageWithoutABatch(_Net):
    """Calls the network on a batch, later on single images."""

    cuts: ClassVar = {2: ["net.second"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(1, 4, 3)
            self.second = nn.Conv1d(4, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))).mean(-1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if len(self.seen) % 2 == 0:
            return cross_entropy(self.net(x[:, None]), y)
        return cross_entropy(torch.stack([self.net(a[None]) for a in x]), y)


# ---------------------------------------------------------------- parts of unequal size


class PartsOfUnequalSize(_Sizes):
    """Batches that cannot be divided by the number of micro-batches."""

    sampled = True
    microbatches = 3
    sizes = (5, 4, 7, 3, 5, 2)


class MorePartsThanSamples(_Sizes):
    """Batches with fewer samples than there are micro-batches."""

    microbatches = 4
    sizes = (4, 3, 2, 1, 4, 4)


class AveragesPartsOfUnequalSize(_Sizes):
    """A mean over the batch in the network, with unequal micro-batches."""

    sizes = (5, 3, 5)
    microbatches = 2

    class Net(Layers):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            hidden = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(hidden))), hidden.square().mean()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, penalty = self.net(x)
        return cross_entropy(logits, y) + 0.1 * penalty


# ---------------------------------------------------------------- other things of the batch's size


class SupportsAsManyAsTheBatch(_Sizes):
    """A support set for all samples is as long as the first batch."""

    shares = True

    shapes = EVERY
    sizes = (4, 3, 4, 2, 5, 4)

    class Net(Layers):
        def forward(self, x: Tensor, support: Tensor) -> Tensor:  # type: ignore[override]
            return -torch.cdist(super().forward(x), super().forward(support))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        support = torch.linspace(-1, 1, 24, dtype=x.dtype).view(4, 6)
        return cross_entropy(self.net(x, support), y)


class MasksAsLongAsTheBatch(_Sizes):
    """An attention mask is as long as the batch."""

    sizes = (4, 4, 3, 2, 4, 5)
    cuts: ClassVar = {2: ["net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.embed(x)
            x = x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]
            return self.head(x[:, -1])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([x, x], 1).view(len(x), 4, 3)
        causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
        return cross_entropy(self.net(x, causal), y)


class PositionsAsManyAsTheBatch(_Sizes):
    """A table of positions has as many rows as the batch."""

    sizes = (4, 4, 2, 3)
    cuts: ClassVar = {2: ["net.second"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1, 8)
            self.second = nn.Linear(8, 3)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x[..., None]) + positions)).mean(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        positions = torch.linspace(-1, 1, 32, dtype=x.dtype).view(4, 8)
        return cross_entropy(self.net(x[:, :4], positions), y)


class HasTheBatchSecond(_Sizes):
    """Sequences come as (time, batch, features), with as many steps as samples."""

    shapes = EVERY
    sizes = (4, 4, 3, 4, 2, 5)
    cuts: ClassVar = {2: ["net.second"], 3: ["net.second", "net.head"]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.GRU(2, 8)
            self.second = nn.GRU(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.first(x)[0])[0])  # (time, batch, classes)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        steps = torch.stack([x[:, i : i + 2] for i in range(4)])
        return cross_entropy(self.net(steps)[-1], y)


class HasSquareOutputs(_Net):
    """The network returns a (batch, batch) matrix of comparisons."""

    shapes = EVERY

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x @ x.T

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x), torch.arange(len(x)))


class SqueezesOutputs(_Sizes):
    """`squeeze()` without a dimension. It takes the batch dimension of a single sample too."""

    sampled = True
    sizes = (4, 2, 3, 1, 4, 2)

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, :1].squeeze()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - x.sum(1).squeeze()).square().mean()


class FlattensTheBatch(_Net):
    """Outputs have all samples in one row, or several rows per sample."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            x = super().forward(x)
            return x.flatten(), x.repeat_interleave(2, dim=0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        row, twice = self.net(x)
        return cross_entropy(row.view(len(x), 3), y) + cross_entropy(twice[::2], y)


class FoldsTimeIntoTheBatch(_Net):
    """Frames of a film are samples to the first layers: (batch * time, ...)."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            batch, frames = x.shape[:2]
            x = torch.tanh(self.first(x.flatten(0, 1)))
            x = torch.tanh(self.second(x)).view(batch, frames, -1)
            return self.third(x.mean(1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(torch.stack([x, x.flip(1), -x], 1)), y)


class TakesTwoViewsAsOneBatch(_Net):
    """Two views are concatenated to one batch, and split in the network."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            one, other = super().forward(x).chunk(2)
            return one - other

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(torch.cat([x, x.flip(1)])), y)


class TakesLengths(_Net):
    """All samples in one tensor, with a list of their lengths."""

    class Net(Layers):
        def forward(self, x: Tensor, lengths: list[int]) -> Tensor:  # type: ignore[override]
            x = torch.tanh(self.first(x))
            parts = [part.mean(0) for part in x.split(lengths)]
            return self.third(torch.tanh(self.second(torch.stack(parts))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        lengths = [1 + (i + len(self.seen)) % 3 for i in range(len(x))]
        items = torch.cat([row.repeat(n, 1) for row, n in zip(x, lengths)])
        return cross_entropy(self.net(items, lengths), y)


# ---------------------------------------------------------------- samples that meet


class _Meets(_Net):
    """What the samples do to one another; batches must not be split."""

    class Net(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.meet(torch.tanh(self.second(torch.tanh(self.first(x))))))

        def meet(self, x: Tensor) -> Tensor:
            raise NotImplementedError


class CentersTheBatch(_Meets):
    """The network standardises the batch by its mean and deviation. The batch stays whole."""

    sampled = True
    shapes = EVERY

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / (x.std(0) + 1)


class CentersTheBatchOfConfigureModel(CentersTheBatch):
    """A network that is made in `configure_model` centers the batch: that samples meet is seen
    before there are weights.
    """

    sampled = True
    gathered = True

    def build(self) -> None:
        self.net: Layers | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.Net().double()


class AttendsToTheBatch(_Meets):
    """Attention between the samples of a batch. The batch stays whole."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return x + (x @ x.T).softmax(-1) @ x


class RollsTheBatch(_Meets):
    """Each sample is combined with the one before it. The batch stays whole."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return x * x.roll(1, 0)


class RanksTheBatch(_Meets):
    """Samples get positions in the order of a score. The batch stays whole."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort().argsort()
            return x * (1 + order[:, None].to(x.dtype))


class ScalesByTheSizeOfTheBatch(_Meets):
    """The network divides by the root of the batch's size. The batch stays whole."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return x * x.shape[0] ** -0.5


class BranchesOnTheSizeOfTheBatch(_Meets):
    """An `if` on the size of the batch. The batch stays whole."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return x * 2 if len(x) > 2 else x


class NumbersTheSamples(_Meets):
    """Multiplies each sample by its number in the batch. The batch stays whole."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return x * torch.arange(len(x), dtype=x.dtype)[:, None]


class MeetsThroughAGate(_Meets):
    """Samples meet behind a gate that is zero at first.

    No comparison of values would show it. The batch stays whole.
    """

    fast = True
    shapes = EVERY
    trains = True

    class Net(_Meets.Net):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        def meet(self, x: Tensor) -> Tensor:
            return x + self.gate * (x - x.mean(0)).square()


class MeetsInTrainingOnly(_Meets):
    """Samples meet in training mode, and not in `eval` mode."""

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            return x - x.flip(0).tanh() if self.training else x


class MixesInTrainingOnly(_Meets):
    """Manifold mixup in training mode, by a permutation that the network draws."""

    per_microbatch = True
    parts = 1
    control = False  # random numbers

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return 0.7 * x + 0.3 * x[torch.randperm(x.shape[0])]


class DrawsOnceForTheBatch(_Meets):
    """Draws one random direction for all samples. The batch stays whole."""

    sampled = True
    control = False  # random numbers

    class Net(_Meets.Net):
        def meet(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x + 0.1 * torch.randn(x.shape[1], dtype=x.dtype, device=x.device)


class BalancesTheBatch(_Net):
    """A load-balancing loss within the network: the share of each gate in the batch, times its mean
    probability.
    """

    class Net(Layers):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            gates = torch.tanh(self.second(torch.tanh(self.first(x)))).softmax(-1)
            chosen = nn.functional.one_hot(gates.argmax(-1), 8).to(x.dtype).mean(0)
            return self.third(gates), (chosen * gates.mean(0)).sum() * 8

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, balance = self.net(x)
        return cross_entropy(logits, y) + 0.1 * balance
