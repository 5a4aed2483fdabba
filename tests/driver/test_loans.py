"""What workers lend the driver travels from device to device, and all of it arrives."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Model, batches, loss_of, train
from test_tied_weights import Tied

from lightning_hybrid.comm.message_channel import Channel, encode


def test_no_tensor_that_the_driver_borrows_travels_with_messages(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are on wires for tensors of devices; what is told are integers."""
    module, told = Model(Tied()).double(), list[tuple[str, int, int]]()
    replica, send = replicas(module, (1, 0)), Channel.send

    def noted(channel: Channel, message: Any) -> None:
        _, pickled, tensors = encode(message)
        told.append((type(message).__name__, len(pickled), len(tensors)))
        send(channel, message)

    monkeypatch.setattr(Channel, "send", noted)
    train(replica, torch.optim.SGD(module.parameters(), lr=0.1))
    first = [name for name, *_ in told].index("Step")
    later = told[first + 1 :]
    steady = {"Forward", "LendWeights", "Backward", "TakeLentGradients", "Step"}
    assert steady <= {name for name, *_ in later}
    assert not [each for each in later if each[1:] != (0, 0)]


class TiedTwice(Tied):
    """Two weights are used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.third.weight = self.second.weight


def test_a_gradient_of_some_of_the_borrowed_weights_reaches_their_owner(replicas: Any) -> None:
    """A penalty on one of them, between two batches."""
    module = Model(TiedTwice()).double()
    reference, replica = deepcopy(module), replicas(module, (1, 0))
    for value in batches(2):
        for one, outputs in ((module, replica(value)), (reference, reference.net(value))):
            loss_of(one, outputs).backward()
            replica.driver.gradients.settle()
            one.net.first.weight.square().sum().backward()
    for name, parameter in reference.named_parameters():
        mine = module.get_parameter(name).grad
        torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=1e-12, msg=name)
