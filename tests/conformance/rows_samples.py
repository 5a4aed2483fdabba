"""Networks in which samples meet at their ends, or seem to: batches go through in micro-batches."""

from typing import Any, ClassVar

import torch
from suite import Layers, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader


class MakesItsLossInside(Row):
    """The network returns a loss with class weights, a mean over some samples, and logits."""

    sampled = True

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            weight = torch.arange(1.0, 4, dtype=x.dtype, device=x.device)
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
    """A contrastive loss with a learned temperature."""

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
    """`logits[torch.arange(batch), labels]`: positions in the batch are used as indices."""

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return -logits.log_softmax(1)[torch.arange(len(x)), y].mean(), logits


class PutsTimeFirst(MakesItsLossInside):
    """Attention with torch's default layout inside of the network: the batch lies behind time."""

    sampled = True

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
    """Mixup with random partners at the start of the network: the permutation is drawn once, as on
    one device.
    """

    fast = True
    control = False  # random numbers

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            order = torch.randperm(len(x))
            logits = super().forward(0.7 * x + 0.3 * x[order])
            return 0.7 * cross_entropy(logits, y) + 0.3 * cross_entropy(logits, y[order]), logits


class ScalesByItsInputs(MakesItsLossInside):
    """The network scales its inputs by statistics of the whole batch."""

    class Net(Layers):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            logits = super().forward((x - x.mean(0)) / (x.std(0) + 0.1))
            return cross_entropy(logits, y), logits


class SendsSamplesToExperts(MakesItsLossInside):
    """A router sends samples to two experts, by `torch.where` and `index_add_`."""

    sampled = True

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.third = self._modules.pop("third")  # parameters in the order of their stages

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
    """A mask picks samples of experts, and results are added in place."""

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
    """Samples are sorted by expert, and put back in order."""

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
    """Experts with a capacity: which samples find a place depends on all of them, so the batch
    stays whole.
    """

    parts = 1

    class Net(SendsSamplesToExperts.Net):
        def mixed(self, h: Tensor) -> Tensor:
            chosen = nn.functional.one_hot(self.router(h).argmax(-1), 3)
            kept = ((chosen.cumsum(0) * chosen).sum(-1) <= 2).to(h.dtype)
            return self.experts[0](h) * kept[:, None]


class TakesTimeFirst(MakesItsLossInside):
    """The batch is dimension 1 (`batch_first=False`), as for torch's transformers."""

    sampled = True

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
    """The batch is dimension 1 of recurrent layers (`batch_first=False`)."""

    class Net(TakesTimeFirst.Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.LSTM(4, 4)  # type: ignore[assignment]

        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            states, (last, _) = self.second(torch.tanh(self.first(x)))
            logits = self.third(states.mean(0) + last[0])
            return cross_entropy(logits, y), logits


class TakesAnOrder(MakesItsLossInside):
    """An argument has indices of samples, whose hidden states are taken. The batch stays whole."""

    class Net(Layers):
        def forward(self, x: Tensor, order: Tensor) -> Tensor:  # type: ignore[override]
            h = torch.tanh(self.first(x))
            return self.third(torch.tanh(self.second(h + h[order])) + h)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x, torch.arange(len(x)).flip(0)), y)


class TakesAnOrderOfItsInputs(TakesAnOrder):
    """An argument has indices by which inputs are ordered, before the stages."""

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
    """The network returns its loss; three micro-batches."""


class MixesItsInputsInThree(_InThree, MixesItsInputs):
    """Mixup at the start of the network; three micro-batches."""


class SendsSamplesToExpertsInThree(_InThree, SendsSamplesToExperts):
    """A router sends samples to experts, of which some get none; three micro-batches."""


class TakesTimeFirstInThree(_InThree, TakesTimeFirst):
    """The batch is dimension 1; three micro-batches."""


class ComparesSamplesInThree(_InThree, ComparesSamplesAtTheEnd):
    """A contrastive loss at the end; three micro-batches."""


class MasksSamplesOfExpertsInThree(_InThree, MasksSamplesOfExperts):
    """A mask picks samples of experts; three micro-batches."""


class SortsSamplesByExpertInThree(_InThree, SortsSamplesByExpert):
    """Samples are sorted by their expert in each of three micro-batches."""


class MakesItsLossInsideInAnyNumber(MakesItsLossInside):
    """A loss with class weights in the network; ``num_microbatches="auto"``."""

    arguments: ClassVar = {"num_microbatches": "auto"}


class ComparesSamplesInAnyNumber(ComparesSamplesAtTheEnd):
    """A contrastive loss at the end; ``num_microbatches="auto"``."""

    arguments: ClassVar = {"num_microbatches": "auto"}


class SendsSamplesToExpertsInAnyNumber(SendsSamplesToExperts):
    """A router sends samples to experts; ``num_microbatches="auto"``."""

    arguments: ClassVar = {"num_microbatches": "auto"}


class TakesTimeFirstInAnyNumber(TakesTimeFirst):
    """The batch is dimension 1; ``num_microbatches="auto"``."""

    arguments: ClassVar = {"num_microbatches": "auto"}


class DropsAsOnOneDevice(Row):
    """Dropout with `rng="device"`: the masks are those of one device.

    Batches go whole, and the generator's state with them.
    """

    control = False  # random numbers
    arguments: ClassVar = {"rng": "device"}
    cuts: ClassVar = {2: ["net.3"], 3: ["net.3", "net.6"]}

    def build(self) -> None:
        layers = [m for i in (6, 8) for m in (nn.Linear(i, 8), nn.Tanh(), nn.Dropout(0.3))]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x + 0.1 * torch.randn_like(x), y)
        self.seen.append(torch.get_rng_state())
        return loss


class DropsAsOnOneDeviceAndRecomputes(DropsAsOnOneDevice):
    """Dropout with `rng="device"` and `recompute=True`: what runs again has the same masks."""

    arguments: ClassVar = {"rng": "device", "recompute": True}


class DropsInAttentionAsOnOneDevice(DropsAsOnOneDevice):
    """Attention that drops out, with `rng="device"`: batches go whole, as on one device."""

    cuts: ClassVar = Row.cuts

    class Net(PutsTimeFirst.Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.TransformerEncoderLayer(4, 2, 8, 0.3)  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            h = torch.tanh(self.first(x)).view(len(x), 2, 4).transpose(0, 1)
            return self.third(self.second(h).transpose(0, 1).flatten(1))

    def build(self) -> None:
        self.net = self.Net()
