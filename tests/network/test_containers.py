"""Containers and generators that TorchDynamo computes wrongly: right here, or not captured."""

import random
from collections import OrderedDict, deque

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid._torch.capture import TorchDynamoException, capture_settings
from lightning_hybrid._torch.containers import TABLES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.last: deque[Tensor] = deque(maxlen=3)
        self.order = OrderedDict(a=1.0, b=2.0)
        self.random = random.Random(3)


class Remembers(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(x.detach())
        self.last.extendleft([x.detach(), 2 * x.detach()])
        return x + sum(self.recent) + sum(self.last)


class Moves(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.order.move_to_end("a")
        return x * next(iter(self.order.values()))


class Draws(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.random.random()


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_full_queue_gives_up_an_element_for_each_new_one(compiled_before: bool) -> None:
    torch._dynamo.reset()
    for table in TABLES:
        table.cache_clear()
    if compiled_before:  # TorchDynamo has its table of types then
        torch.compile(Remembers(), backend="eager")(torch.tensor(1.0))
    net, same = Remembers(), Remembers()
    captured = torch.compile(net, backend="eager", fullgraph=True)
    for step in range(5):
        with capture_settings():
            found = captured(torch.tensor(float(step)))
        assert torch.equal(found, same(torch.tensor(float(step))))
    assert (net.recent, net.last) == (same.recent, same.last)


@pytest.mark.parametrize(
    ("kind", "what"), [(Moves, "OrderedDict.move_to_end"), (Draws, "random.Random.random")]
)
def test_what_would_go_wrong_is_not_captured(kind: type[Net], what: str) -> None:
    torch._dynamo.reset()
    captured = torch.compile(kind(), backend="eager", fullgraph=True)
    with capture_settings(), pytest.raises(TorchDynamoException, match=what):
        captured(torch.ones(1))
