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


class DropsSome(Drops):
    """Dropout of as many rows as the values say, of none at first."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[3:5](self.layers[:2](x))
        return self.layers[9:](nn.functional.dropout(h[x[:, 0] > 0], 0.4, self.training))


@pytest.mark.parametrize(
    ("kind", "workers", "told"),
    [
        *((Drops, 1, True), (Drops, 2, True), (Attends, 2, True), (DropsBesidePython, 1, False)),
        (DropsSome, 1, False),
    ],
)
def test_stages_draw_the_numbers_of_one_device_for_whole_batches(
    ranks: Any, kind: Callable[[], nn.Module], workers: int, told: bool
) -> None:
    driven = Driven(ranks, kind(), workers, verify="auto")
    driven.ranks.driver.calls.as_on_one_device = True
    for step in range(3):
        value = torch.randn(4, 6, dtype=torch.float64)
        value[:, 0] = value[:, 0].abs() * step  # (of `DropsSome` none in the first step)
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
    assert [line for line in whole if "draws random numbers" in line] == whole[:told]
    assert not [line for line in driven.lines if "not verified" in line]


def test_draws_that_the_first_call_has_left_out_are_those_of_the_call(ranks: Any) -> None:
    driven = Driven(ranks, DropsSome(), verify=1)  # (which compares each call)
    for step in range(2):
        driven.module.net(torch.full((4, 6), float(step), dtype=torch.float64))
    assert not [line for line in driven.lines if "not verified" in line]
