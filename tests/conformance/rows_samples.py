"""Networks in which samples meet at their ends, or seem to: batches go through in micro-batches."""

from typing import Any, ClassVar

import torch
from suite import Layers, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader


class MakesItsLossInside(Row):
    """Class weights, a mean over some samples, and the logits beside them."""

    fast = True

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            weight = torch.arange(1.0, 4, dtype=x.dtype)
            kept = (y > 0).to(x.dtype)
            mean = (logits.square().sum(1) * kept).sum() / (kept.sum() + 1)
            return cross_entropy(logits, y, weight) + 0.1 * mean, logits

    def build(self) -> None:
        self.net = self.Net()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, logits = self.net(x, y)
        self.seen.append(logits.argmax(1).tolist())
        return loss + 0.01 * logits.square().mean()


class ComparesSamplesAtTheEnd(MakesItsLossInside):
    """A contrastive loss with a learned temperature, which only the end of the network uses."""

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            one = super().forward(x)
            other = super().forward(x.flip(1))
            logits = self.scale.exp() * normalize(one, dim=1) @ normalize(other, dim=1).T
            return cross_entropy(logits, torch.arange(len(x))), one

    shares = True  # each layer runs twice


class TakesTheEntriesOfItsLabels(MakesItsLossInside):
    """Positions in the batch are used as indices."""

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return -logits.log_softmax(1)[torch.arange(len(x)), y].mean(), logits


class PutsTimeFirst(MakesItsLossInside):
    """Attention with torch's default layout: the batch lies behind time."""

    fast = True

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.MultiheadAttention(4, 2)  # type: ignore[assignment]

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            h = torch.tanh(self.first(x)).view(len(x), 2, 4).transpose(0, 1)
            h = (h + self.second(h, h, h)[0]).transpose(0, 1).flatten(1)
            logits = self.third(torch.tanh(h))
            return cross_entropy(logits, y), logits


class MixesItsInputs(MakesItsLossInside):
    """Mixup with random partners: the permutation is drawn once, as on one device."""

    fast = True
    control = False  # random numbers

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            order = torch.randperm(len(x))
            logits = super().forward(0.7 * x + 0.3 * x[order])
            return 0.7 * cross_entropy(logits, y) + 0.3 * cross_entropy(logits, y[order]), logits


class ScalesByItsInputs(MakesItsLossInside):
    """Statistics of the inputs of the whole batch."""

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward((x - x.mean(0)) / (x.std(0) + 0.1))
            return cross_entropy(logits, y), logits


class SendsSamplesToExperts(MakesItsLossInside):
    """Each sample goes to the two experts that a router chooses, as most people write it."""

    fast = True

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def mixed(self, h: Tensor) -> Tensor:
            weights, chosen = self.router(h).softmax(-1).topk(2)
            out = torch.zeros_like(h)
            for number, expert in enumerate(self.experts):
                at, which = torch.where(chosen == number)
                out.index_add_(0, at, expert(h[at]).tanh() * weights[at, which, None])
            return out

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            h = torch.tanh(self.second(torch.tanh(self.first(x))))
            logits = self.third(h + self.mixed(h))
            return cross_entropy(logits, y), logits


class MasksSamplesOfExperts(SendsSamplesToExperts):
    """The same by masks, into which the results are added."""

    class Net(SendsSamplesToExperts.Net):
        def mixed(self, h: Tensor) -> Tensor:
            logits = self.router(h)
            best, chosen = logits.topk(2)
            gates = torch.full_like(logits, -torch.inf).scatter(-1, chosen, best).softmax(-1)
            out = torch.zeros_like(h)
            for number, expert in enumerate(self.experts):
                mask = (chosen == number).any(-1)
                out[mask] += expert(h[mask]).tanh() * gates[mask, number].unsqueeze(1)
            return out


class SortsSamplesByExpert(SendsSamplesToExperts):
    """Sorted by the expert that was chosen, and back."""

    class Net(SendsSamplesToExperts.Net):
        def mixed(self, h: Tensor) -> Tensor:
            weights, chosen = self.router(h).softmax(-1).topk(2)
            number, order = chosen.reshape(-1).sort()
            table = torch.stack([expert.weight for expert in self.experts])
            some = torch.einsum("nij,nj->ni", table[number], h[order // 2])
            some = some * weights.reshape(-1)[order].unsqueeze(-1)
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            return some[back].view(len(h), 2, -1).sum(1)


class LimitsItsExperts(SendsSamplesToExperts):
    """Experts with a capacity: which samples find a place depends on all of them."""

    parts = 1

    class Net(SendsSamplesToExperts.Net):
        def mixed(self, h: Tensor) -> Tensor:
            chosen = nn.functional.one_hot(self.router(h).argmax(-1), 3)
            kept = ((chosen.cumsum(0) * chosen).sum(-1) <= 2).to(h.dtype)
            return self.experts[0](h) * kept[:, None]


class TakesTimeFirst(MakesItsLossInside):
    """The batch is dimension 1 of the inputs, as torch's transformers want it."""

    fast = True

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.third = nn.Linear(2, 4), nn.Linear(4, 3)
            self.second = nn.TransformerEncoderLayer(4, 2, 8, 0.0)  # type: ignore[assignment]

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = self.third(self.second(torch.tanh(self.first(x)))).mean(0)
            return cross_entropy(logits, y), logits

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.view(len(x), 3, 2).transpose(0, 1), y)


class TakesTimeFirstInLSTMs(TakesTimeFirst):
    """The same of recurrent layers."""

    class Net(TakesTimeFirst.Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.LSTM(4, 4)  # type: ignore[assignment]

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            states, (last, _) = self.second(torch.tanh(self.first(x)))
            logits = self.third(states.mean(0) + last[0])
            return cross_entropy(logits, y), logits


class TakesAnOrder(MakesItsLossInside):
    """An argument has indices of samples: the hidden states of others are taken whole."""

    class Net(Layers):
        def forward(self, x: Tensor, order: Tensor) -> Tensor:  # type: ignore[override]
            h = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(h + h[order])) + h)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x, torch.arange(len(x)).flip(0)), y)


class TakesAnOrderOfItsInputs(TakesAnOrder):
    """The same of the inputs themselves, which the driver has."""

    class Net(Layers):
        def forward(self, x: Tensor, order: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + x[order])


class _InThree(Row):
    """Batches of 6 in three micro-batches."""

    microbatches = 3
    samples = 36

    def train_dataloader(self) -> Any:
        indices = torch.arange(self.samples).split(6)
        mine = indices[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(self.dataset(), batch_sampler=[part.tolist() for part in mine])


class MakesItsLossInsideInThree(_InThree, MakesItsLossInside):
    """Three micro-batches before one tail."""


class MixesItsInputsInThree(_InThree, MixesItsInputs):
    """Three micro-batches after one prologue."""


class SendsSamplesToExpertsInThree(_InThree, SendsSamplesToExperts):
    """Of two samples some experts see none."""


class TakesTimeFirstInThree(_InThree, TakesTimeFirst):
    """Three micro-batches along dimension 1."""


class ComparesSamplesInAnyNumber(ComparesSamplesAtTheEnd):
    """The number of micro-batches is chosen."""

    arguments: ClassVar = {"num_microbatches": "auto"}


class SendsSamplesToExpertsInAnyNumber(SendsSamplesToExperts):
    """The number of micro-batches is chosen."""

    arguments: ClassVar = {"num_microbatches": "auto"}


class TakesTimeFirstInAnyNumber(TakesTimeFirst):
    """The number of micro-batches is chosen."""

    arguments: ClassVar = {"num_microbatches": "auto"}
