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


class Settings(dict[str, float]):
    pass


class ReadsSettings(Net):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.settings = Settings(dict.fromkeys(names, 1.0))
        self.settings.act, self.settings.scales = torch.tanh, [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.settings.act(x) * self.settings.scales[0]


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
    ("kind", "what"),
    [
        (Moves, "OrderedDict.move_to_end"),
        (Draws, "random.Random.random"),
        (ReadsSettings, "Settings.act, of an empty dictionary"),
    ],
)
def test_what_would_go_wrong_is_not_captured(kind: type[Net], what: str) -> None:
    torch._dynamo.reset()
    captured = torch.compile(kind(), backend="eager", fullgraph=True)
    with capture_settings(), pytest.raises(TorchDynamoException, match=what):
        captured(torch.ones(1))


def test_attributes_of_a_dictionary_that_is_not_empty_are_followed() -> None:
    net, x = ReadsSettings("key"), torch.tensor(0.5)
    captured = torch.compile(net, backend="eager", fullgraph=True)

    def change_entry() -> None:
        net.settings.scales[0] = 3.0

    def change_function() -> None:
        net.settings.act = torch.cos

    for change in (lambda: None, change_entry, change_function):
        change()
        with capture_settings():
            assert torch.equal(captured(x), net.forward(x))
