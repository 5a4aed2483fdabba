"""A weight that stages of several ranks use has one value and one gradient."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Model, batches, train, train_one_device
from torch import Tensor, nn


class Tied(nn.Module):
    """Layers of which the first and the last have the same weights."""

    captured_once = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third, self.last):
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 0), (2, 0, 1, 0)])
def test_tied_weights_train_as_on_one_device(replicas: Any, devices: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Model(Tied()).double()
    reference = deepcopy(module)
    expected = train_one_device(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    replica = replicas(module, devices)
    assert train(replica, torch.optim.SGD(module.parameters(), lr=0.1)) == pytest.approx(
        expected, abs=1e-12
    )
    replica.end()
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 0), (2, 0, 1, 0)])
def test_their_optimizer_states_are_as_on_one_device(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    module = Model(Tied()).double()
    reference = deepcopy(module)
    alone = torch.optim.Adam(reference.parameters(), lr=0.1)
    train_one_device(reference, alone)
    replica, optimizer = replicas(module, devices), torch.optim.Adam(module.parameters(), lr=0.1)
    train(replica, optimizer)
    states = optimizer.state_dict()["state"], alone.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    torch.testing.assert_close(*states, rtol=0, atol=1e-12)
    replica.end()
    torch.testing.assert_close(optimizer.state_dict()["state"], states[1], rtol=0, atol=1e-12)


def test_what_the_user_writes_reaches_the_borrower(replicas: Any) -> None:
    module, [value] = Model(Tied()).double(), batches(1)
    reference, replica = deepcopy(module), replicas(module, (1, 2, 0))
    for one in (module, reference):
        with torch.no_grad():
            one.net.first.weight.mul_(2)
    torch.testing.assert_close(replica(value), reference.net(value), rtol=1e-12, atol=1e-12)
