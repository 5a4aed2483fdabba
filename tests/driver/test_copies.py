"""Copies of a stage: micro-batches dealt in turn, gradients summed, weights alike; as one device."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Model, Replica, model
from torch import Tensor, nn

SHAPES = {

    "2-1": ((1, 2), 0),
    "3-1": ((1, 2, 3), 0),
    "2-1-1": ((1, 2), 3, 0),
    "1-2-1": (1, (2, 3), 0),
}
Make = Callable[..., Replica]
CLOSE = {"rtol": 0.0, "atol": 1e-10}


def batches() -> list[Tensor]:
    """Of 13 samples each; the last one has fewer micro-batches than a stage has copies."""
    generator = torch.Generator().manual_seed(1)
    sizes = (13, 13, 13, 2)
    return [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]


def loss_of(module: Model, output: Tensor) -> Tensor:
    return (module.scale * output).square().mean()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), 0.01)


def one_device(
    module: Model, optimizer: torch.optim.Optimizer, parts: int = 5, every: int = 1
) -> list[float]:
    """Train; the network is called once per micro-batch."""
    losses = []
    for step, value in enumerate(batches()):
        loss = loss_of(module, torch.cat([module.net(part) for part in value.chunk(parts)]))
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(
    replica: Replica, optimizer: torch.optim.Optimizer, every: int = 1, synchronize: bool = False
) -> list[float]:
    """The same on all ranks of a replica.

    Args:
        replica: the ranks.
        optimizer: the user's.
        every: batches that an optimizer step is for.
        synchronize: whether gradients are made whole after each batch, and not before a step only.
    """
    replica.driver.optimizers.connect([optimizer])
    losses = []
    for step, value in enumerate(batches()):
        replica.driver.begin_step(step)
        replica.driver.gradients.synchronize = synchronize or (step + 1) % every == 0
        loss = loss_of(replica.model, replica(value))
        replica.driver.gradients.before_backward()
        loss.backward()
        replica.driver.gradients.after_backward()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def owners(replica: Replica) -> dict[str, list[Tensor]]:
    """What each rank that owns a tensor of the network has for it, by name."""
    found: dict[str, list[Tensor]] = {}
    for rank, module in replica.modules.items():
        named: dict[str, Any] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name in replica.driver._ownership.tensors_of(rank):
            found.setdefault(name, []).append(named[name].detach())
    return found


def check_copies_alike(replica: Replica) -> None:
    """The copies have the same bits."""
    several = [values for values in owners(replica).values() if len(values) > 1]
    assert several
    for first, *others in several:
        assert all(torch.equal(first, other) for other in others)


def check_as_one_device(module: Model, replica: Replica) -> None:
    """The weights of the driver's module and of all ranks are those of one device."""
    replica.end()
    expected = module.state_dict()
    for name, value in replica.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], **CLOSE)
    check_copies_alike(replica)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_weights_are_those_of_one_device(
    shape: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], replicas: Make
) -> None:
    network = model()
    replica = replicas(deepcopy(network), SHAPES[shape], parts=5)
    expected = one_device(network, optimizer(network))
    found = train(replica, optimizer(replica.model))
    assert found == pytest.approx(expected, rel=0, abs=1e-10)
    check_as_one_device(network, replica)


@pytest.mark.parametrize("synchronize", [False, True])
def test_gradients_that_accumulate_are_counted_once(synchronize: bool, replicas: Make) -> None:
    network = model()
    replica = replicas(deepcopy(network), SHAPES["3-1"], parts=5)
    expected = one_device(network, sgd(network), every=2)
    found = train(replica, sgd(replica.model), every=2, synchronize=synchronize)
    assert found == pytest.approx(expected, rel=0, abs=1e-10)
    check_as_one_device(network, replica)
