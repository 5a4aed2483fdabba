"""With ``rng="device"`` a network draws what it draws on one device."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import InParts, outputs_and_gradients
from torch import Tensor, nn

BATCH = 6

Code = Callable[..., Any]


class Net(nn.Module):
    """Three layers that make nearly all of the load, and a function that uses them."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 8)
        self.drop = nn.Dropout(0.3)
        self.code = code

    def body(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def in_prologue_and_tail(net: Any, x: Tensor) -> Tensor:
    noise = torch.rand(len(x), len(x), dtype=x.dtype)  # for the tail, and before all others
    h = net.body(x + torch.randn(len(x), 8, dtype=x.dtype))
    met = F.dropout(h @ h.T, 0.4) * noise
    return met.sum() + torch.rand_like(met).mean()


def by_dropout(net: Any, x: Tensor) -> Tensor:
    return net.c(net.drop(net.b(net.a(x))))


def after_samples_have_met(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = net.body(x)
    met = h @ h.T
    return met + torch.rand_like(met), net.body(net.drop(h))


def compared(code: Code) -> InParts:
    """A call of a twin, and one in micro-batches; generators afterwards are the same."""
    network = Net(code).double()
    twin, parts = deepcopy(network), InParts(network, 3, draws=False)
    for size in (BATCH, BATCH - 1):
        x = torch.linspace(-1, 1, size * 8, dtype=torch.float64).view(size, 8)
        expected = [*outputs_and_gradients(twin, twin, x), torch.get_rng_state()]
        found = [*outputs_and_gradients(network, parts, x), torch.get_rng_state()]
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    return parts


def test_what_prologue_and_tail_draw_is_split() -> None:
    parts = compared(in_prologue_and_tail)
    assert parts.why_whole is None
    assert parts.counted == 3
    assert parts.graph is not None
    assert not parts.graph.uses_rng


@pytest.mark.parametrize("code", [by_dropout, after_samples_have_met])
def test_what_layers_draw_goes_whole_and_is_named(code: Code) -> None:
    parts = compared(code)
    assert parts.why_whole is not None
    assert "draws random numbers" in parts.why_whole
    assert "test_draws_of_one_device.py" in parts.why_whole


def test_nothing_is_drawn_in_an_evaluation() -> None:
    parts = InParts(Net(lambda net, x: net.drop(net.a(x))).eval(), draws=False)
    before = torch.get_rng_state()
    parts(torch.ones(BATCH, 8))
    assert parts.division == "proof"
    assert torch.equal(torch.get_rng_state(), before)
