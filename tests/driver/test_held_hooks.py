"""Hooks on weights of all ranks hear of a backward pass once."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Replica, batches, loss_of, model
from torch import nn

from lightning_hybrid.driver.backward_passes import HeldHooks
from lightning_hybrid.driver.weight_hooks import WorkersGradients


def clamp(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))


def held(replica: Replica) -> HeldHooks:
    driver, networks = replica.driver, [replica.network]
    there = WorkersGradients(networks, driver.commands, driver._ownership)
    return HeldHooks(networks, driver.gradients.bring_to_owners, there)


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 0), (1, 2, 1, 0)])
def test_gradients_are_those_of_one_device_with_its_hooks(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    module, [value] = model(), batches(1)
    reference = deepcopy(module)
    for network in (reference.net, module.net):
        clamp(network)
    replica = replicas(module, devices)
    hooks = held(replica)
    for _ in range(2):  # which accumulate
        loss_of(reference, reference.net(value) + reference.net(-value)).backward()
        replica.driver.begin_step(0)
        with hooks():
            loss_of(module, replica(value) + replica(-value)).backward()
    for mine, theirs in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_after_an_error_the_hooks_are_back(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    heard: list[None] = []
    for parameter in module.net.parameters():
        parameter.register_hook(lambda _: heard.append(None))
    replica = replicas(module, (1, 0))
    hooks = held(replica)
    with pytest.raises(ValueError, match="on purpose"), hooks():
        raise ValueError("on purpose")
    assert not heard
    with hooks():
        loss_of(module, replica(value)).backward()
    replica.end()
    assert len(heard) == len([*module.net.parameters()])


def test_nobody_is_told_of_a_backward_without_hooks(replicas: Any) -> None:
    replica = replicas(model(), (1, 0))
    told: list[Any] = []
    replica.driver.commands.tell = told.append
    with held(replica)():
        pass
    del replica.driver.commands.tell
    assert not told
