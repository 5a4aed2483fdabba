"""One forward, one backward on a device each: one device's numbers, and no rank waits for it."""

from collections import Counter

import pytest
import torch
from driven import let_go
from emulated_cuda import EVENTS, WAITS
from losses_inside import Cut, Net, Tied, batch, compare, whole
from torch import nn

from lightning_hybrid.comm.protocol import GiveFailure


@pytest.mark.parametrize("net", [Net(), Tied(0, 4)], ids=["plain", "tied"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_gradients_are_those_of_the_cpu_and_nobody_waits(
    net: nn.Module, ranks: int, factor: float
) -> None:
    replica, seen = Cut(net, ranks, "1f1b", on=_device), Counter[tuple[str, str]]()
    x, y = (tensor.to("cuda:0") for tensor in batch())
    for step in range(4):
        replica.clear()
        with EVENTS.during() as events:
            replica.begin()
            replica.backward(replica(x, y)["loss"] * factor * (1 + step))
            replica.driver.commands.ask(GiveFailure())  # the workers are done, too
        if step > 1:
            seen.update(events)
    found = {name: g.cpu() for name, g in replica.gradients().items() if g is not None}
    assert replica.why_not == ""
    let_go(replica)
    compare(found, whole(net, batch(), factor=factor * 4), 1e-10)
    assert [event for event in seen if event[0] in WAITS] == []


def _device(rank: int) -> torch.device:
    return torch.device("cuda", rank)
