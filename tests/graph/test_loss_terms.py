"""Losses inside of networks: where each micro-batch has a share, shares add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import InShares
from torch import Tensor, nn

ROWS, STEPS, CLASSES = 6, 4, 5


class Net(nn.Module):
    """Two layers that make nearly all of the load, and a loss of what they return.

    Args:
        loss: of the logits (rows, steps, classes) and the targets (rows, steps).
    """

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(8, 256), nn.Linear(256, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor, n: Any = None) -> Any:
        logits = self.b(torch.tanh(self.a(x)))
        return self.loss(self, logits, y, n)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, STEPS, 8, dtype=torch.float64, generator=generator)
    y = torch.randint(CLASSES, (ROWS, STEPS), generator=generator)
    y[torch.rand(ROWS, STEPS, generator=generator) < 0.4] = -100
    y[:2] = -100  # (a micro-batch without any)
    return x, y


def entropy(h: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(h.flatten(0, 1), y.flatten(), **options)


def weights(h: Tensor) -> Tensor:
    return torch.arange(1, CLASSES + 1, dtype=h.dtype)


def one_hot(y: Tensor, h: Tensor) -> Tensor:
    return F.one_hot(y.clamp(min=0), CLASSES).to(h.dtype)


# ---------------------------------------------------------------- sums, and what follows one


def ignored(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y)


def shifted(net: Any, h: Tensor, y: Tensor, n: Any) -> tuple[Tensor, Tensor]:
    later = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return entropy(h.double(), later), h


def shifted_in_place(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    later = y.new_zeros(y.shape)
    later[:, :-1] = y[:, 1:].clone()
    later.masked_fill_(later == 3, -100)
    return entropy(h, later)


def class_weights(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, weight=weights(h))


def smoothed(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, label_smoothing=0.1)


def smoothed_by_class(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, label_smoothing=0.1, weight=weights(h))


def of_places(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.cross_entropy(h.transpose(1, 2), y, weight=weights(h))


def by_number(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, reduction="sum") / (y != -100).sum()


def by_given(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, reduction="sum") / n


def by_samples(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, reduction="sum") / len(y)


def masked(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    kept = (y > 1).to(h.dtype)
    return (h.square().sum(-1) * kept).sum() / kept.sum()


def squares(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.mse_loss(h, one_hot(y, h))


def binary(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(h, one_hot(y, h), pos_weight=weights(h))


def huber(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.smooth_l1_loss(h, one_hot(y, h)) + F.l1_loss(h, one_hot(y, h), reduction="sum")


def divergence(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.kl_div(h.log_softmax(-1), one_hot(y, h), reduction="batchmean")


def soft_targets(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.cross_entropy(h.flatten(0, 1), one_hot(y, h).flatten(0, 1))


def z_loss(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    total = 0
    total = total + entropy(h, y)
    return total + 1e-2 * h.logsumexp(-1).square().mean()


def focal(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    entries = entropy(h, y, reduction="none")
    return ((1 - (-entries).exp()) ** 2 * entries).mean()


def mean_of_means(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return -h.mean((0, 1)).sum() + h.square().sum(0).mean()


SUMS = [
    *(ignored, shifted, shifted_in_place, class_weights, smoothed, smoothed_by_class, of_places),
    *(by_number, by_given, by_samples, masked, squares, binary, huber, divergence, soft_targets),
    *(z_loss, focal, mean_of_means),
]


def exponential(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y).exp()


def rooted(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return F.mse_loss(h, one_hot(y, h)).sqrt()


def powers(net: Any, h: Tensor, y: Tensor, n: Any) -> dict[str, Any]:
    loss = entropy(h, y)
    return {"loss": loss**2 + loss, "shown": loss.detach(), "number": (y != -100).sum()}


def known_added(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y) + y.to(h.dtype).mean()


def with_weight(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y) * torch.tensor(3.0, dtype=h.dtype)


AFTER = [exponential, rooted, powers, known_added, with_weight]


def taken(result: Any) -> list[Tensor]:
    if isinstance(result, dict):
        return [result["loss"], result["shown"], result["number"]]
    return [*result[:1]] if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("loss", [*SUMS, *AFTER], ids=lambda loss: loss.__name__)
def test_shares_of_micro_batches_are_the_loss_and_its_gradient(loss: Any) -> None:
    net = Net(loss).double()
    other, (x, y), n = deepcopy(net), batch(), torch.tensor(7)
    shares = InShares(net)
    one, whole = taken(shares(x, y, n)), taken(other(x, y, n))
    assert (shares.reason, shares.shared) == ("", 3)
    for value, expected in zip(one, whole, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    one[0].backward()
    whole[0].backward()
    for parameter, expected in zip(net.parameters(), other.parameters()):
        assert (parameter.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- others


def product(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y) * F.mse_loss(h, one_hot(y, h))


def of_two(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y) + F.mse_loss(h, one_hot(y, h)).sqrt()


def balanced(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    used = h.softmax(-1).mean((0, 1))
    return entropy(h, y) + (used * used).sum()


def contrastive(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    flat = h.flatten(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)))


def dice(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    p, t = h.sigmoid(), one_hot(y, h)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def hardest(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y, reduction="none").topk(4).values.mean()


def without_gradients(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    with torch.no_grad():
        factor = h.square().sum()
    return entropy(h, y) * factor


def own_targets(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, h.argmax(-1))


def tempered(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return entropy(h, y) * net.scale


def deviation(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return h.std() + (h - h.mean(0)).square().mean()


def two_losses(net: Any, h: Tensor, y: Tensor, n: Any) -> tuple[Tensor, Tensor]:
    return entropy(h, y), h.square().mean()


def all_logits(net: Any, h: Tensor, y: Tensor, n: Any) -> tuple[Tensor, Tensor]:
    return entropy(h, y), h.max()


def picked(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return h[y > 1].square().mean()


def logits_alone(net: Any, h: Tensor, y: Tensor, n: Any) -> Tensor:
    return h


MEET = [
    *(product, of_two, balanced, contrastive, dice, hardest, without_gradients, own_targets),
    *(tempered, deviation, two_losses, all_logits, picked, logits_alone),
]


@pytest.mark.parametrize("loss", MEET, ids=lambda loss: loss.__name__)
def test_other_losses_are_computed_of_all_samples_and_say_why(loss: Any) -> None:
    shares = InShares(Net(loss).double())
    shares(*batch(), torch.tensor(7))
    assert shares.reason
    assert shares.shared == 0
