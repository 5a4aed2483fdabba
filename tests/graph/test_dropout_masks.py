"""Masks of dropout that are drawn for whole batches: micro-batches compute what one device does."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import InParts, outputs_and_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH = 6

Code = Callable[..., Any]


class Net(nn.Module):
    """Three layers that make nearly all of the load, and a function that uses them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 8)
        self.drop = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.code = code

    def body(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.a(x)))
        return self.c(F.dropout(torch.tanh(self.b(h)), 0.6))

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def elements(net: Any, x: Tensor) -> Tensor:
    return net.body(x)


def channels(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).view(len(x), 16, 4, 4)
    h = F.dropout1d(F.dropout2d(h, 0.4).flatten(2), 0.2).view(len(x), 2, 2, 8, 8)
    return net.c(F.dropout3d(h).flatten(1))


def in_place(net: Any, x: Tensor) -> Tensor:
    return net.c(F.dropout(net.b(net.a(x)), 0.5, inplace=True))


def permuted_in_memory(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).view(len(x), 16, 16).transpose(1, 2)
    return net.c(F.dropout(h).flatten(1))


def folded_behind_time(net: Any, x: Tensor) -> Tensor:
    h = net.a(x).view(len(x), 2, 128).transpose(0, 1).reshape(-1, 128)
    h = F.dropout(h).view(2, -1, 128).transpose(0, 1).flatten(1)
    return net.c(net.b(h))


def same_for_all_samples(net: Any, x: Tensor) -> Tensor:
    return net.body(x * F.dropout(torch.ones(1, 8, dtype=x.dtype)))


def in_regions(net: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(net.body, x, use_reentrant=False)
    return x


def beside_other_draws(net: Any, x: Tensor) -> Tensor:
    noise = torch.rand(len(x), len(x), dtype=x.dtype)  # for the tail, and before all masks
    h = net.body(x + torch.randn(len(x), 8, dtype=x.dtype))
    met = F.dropout(h @ h.T, 0.4) * noise
    return met.sum() + torch.rand_like(met).mean()


SPLIT: list[Code] = [
    elements, channels, in_place, permuted_in_memory, folded_behind_time, same_for_all_samples,
    beside_other_draws,
]  # fmt: skip


def attention(net: Any, x: Tensor) -> Tensor:
    h = net.body(x)[:, None].expand(-1, 3, -1)
    return net.attention(h, h, h, need_weights=False)[0]


def made_of_what_layers_return(net: Any, x: Tensor) -> Tensor:
    h = net.body(x)
    return net.body(h + torch.bernoulli(torch.sigmoid(h)))


def after_samples_have_met(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.body(x)
    met = h @ h.T
    return met + torch.rand_like(met), net.body(h)


WHOLE: list[Code] = [
    attention, in_regions, made_of_what_layers_return, after_samples_have_met
]  # fmt: skip


def compared(code: Code, microbatches: int) -> InParts:
    """A call of a twin, and one in micro-batches; generators afterwards are the same."""
    network = Net(code).double()
    twin, parts = deepcopy(network), InParts(network, microbatches, draws=False)
    for size in (BATCH, BATCH - 1):
        x = torch.linspace(-1, 1, size * 8, dtype=torch.float64).view(size, 8)
        expected = [*outputs_and_gradients(twin, twin, x), torch.get_rng_state()]
        found = [*outputs_and_gradients(network, parts, x), torch.get_rng_state()]
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    return parts


@pytest.mark.parametrize("code", SPLIT, ids=lambda code: code.__name__)
def test_masks_of_micro_batches_are_those_of_the_whole_batch(code: Code) -> None:
    parts = compared(code, 3)
    assert parts.why_whole is None
    assert parts.counted == 3
    assert parts.graph is not None
    assert not parts.graph.uses_rng


@pytest.mark.parametrize("code", WHOLE, ids=lambda code: code.__name__)
def test_what_cannot_be_drawn_beforehand_goes_whole_and_is_named(code: Code) -> None:
    parts = compared(code, 3)
    assert parts.why_whole is not None
    assert "draws random numbers" in parts.why_whole
    assert "test_dropout_masks.py" in parts.why_whole


def test_nothing_is_drawn_in_an_evaluation() -> None:
    parts = InParts(Net(lambda net, x: net.drop(net.a(x))).eval(), draws=False)
    before = torch.get_rng_state()
    parts(torch.ones(BATCH, 8))
    assert parts.division == "proof"
    assert torch.equal(torch.get_rng_state(), before)
