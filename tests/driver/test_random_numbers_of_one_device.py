"""Networks that are cut draw what one device draws, if that is asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adopted import Driven
from torch import Tensor, nn


class Drops(nn.Module):
    """Dropout in each stage."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for i in (6, 16, 16) for m in (nn.Linear(i, 16), nn.Tanh(), nn.Dropout(0.3))]
        self.layers = nn.Sequential(*layers, nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Attends(Drops):
    """Masks that attention keeps to itself, after others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)[None]
        return self.attention(h, h, h, need_weights=False)[0][0]


class DropsBesidePython(Drops):
    """A chain of two graphs, between which Python looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[:6](x)
        return self.layers[6:](h if h.sum() > -1e9 else -h)


@pytest.mark.parametrize(
    ("kind", "workers", "told"),
    [(Drops, 1, True), (Drops, 2, True), (Attends, 2, True), (DropsBesidePython, 1, False)],
)
def test_stages_draw_the_numbers_of_one_device_for_whole_batches(
    ranks: Any, kind: Callable[[], nn.Module], workers: int, told: bool
) -> None:
    driven = Driven(ranks, kind(), workers, verify="auto")
    driven.ranks.driver.calls.follows = True
    for step in range(3):
        value = torch.randn(4, 6, dtype=torch.float64)
        results = []
        for network in (driven.module.net, driven.reference):
            network.zero_grad()
            torch.manual_seed(step)
            output = network(value)
            output.square().sum().backward()
            results.append([output, *(p.grad for p in network.parameters())])
        for mine, theirs in zip(*results):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    whole = [line for line in driven.lines if "takes each batch whole" in line]
    assert [("draws random numbers" in line) for line in whole] == [True] * told
    assert not [line for line in driven.lines if "not verified" in line]
