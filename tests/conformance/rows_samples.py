"""Networks in which samples meet at their ends, or seem to: batches go through in micro-batches."""

from typing import Any

import torch
from suite import Layers, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize


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
