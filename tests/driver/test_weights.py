"""The weights of all stages are on the driver where they are needed, and come from it."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import batches, loss_of, model
from torch import Tensor, nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.driver.weights import Weights
from lightning_hybrid.remote.proxies import Proxies

DEVICES = [(1, 0), (1, 2, 0)]


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def step(replica: Any) -> dict[str, Tensor]:
    """One step on all ranks. Returns what one device has after it."""
    reference, [value] = deepcopy(replica.model), batches(1)
    for module, call in ((reference, reference.net), (replica.model, replica)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if call is replica:
            replica.driver.optimizers.connect([optimizer])
        loss_of(module, call(value)).backward()
        if call is replica:
            replica.driver.gradients.after_backward()
        optimizer.step()
    return values(reference)


@pytest.mark.parametrize("devices", DEVICES)
def test_inside_whole_the_state_dict_is_that_of_one_device(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    replica = replicas(model(), devices)
    expected = step(replica)
    with replica.driver.weights.gathered(), replica.driver.remote.suspended():
        torch.testing.assert_close(values(replica.model), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
def test_scattered_weights_are_those_that_the_stages_compute_with(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    replica, [value] = replicas(model(), devices), batches(1)
    with replica.driver.remote.suspended(), torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.mul_(2)
        reference = deepcopy(replica.model)
    replica.driver.weights.scatter()
    torch.testing.assert_close(replica(value), reference.net(value), rtol=1e-12, atol=1e-12)


def test_before_any_network_is_cut_nothing_is_fetched_or_sent(crew: Any) -> None:
    ownership = Ownership(crew.workers, set())
    commands = Commands(crew.workers, Proxies(ownership, torch.device("cpu")))
    nothing: Any = None
    module = model()
    weights = Weights(module, module, Coordinates(0, 1, 3), commands, ownership, *[nothing] * 2)
    weights.bring_into_module()  # else it would wait for answers
    weights.scatter()
    with weights.gathered():
        pass


def test_the_driver_gets_all_weights_in_the_end(replicas: Any) -> None:
    replica = replicas(model(), (1, 2, 0))
    expected = step(replica)
    replica.end()
    torch.testing.assert_close(values(replica.model), expected, rtol=1e-12, atol=1e-12)


def test_a_change_of_what_this_rank_owns_is_seen(replicas: Any) -> None:
    replica = replicas(model(), (1, 0))
    weights = replica.driver.weights
    weights.remember()
    replica(batches(1)[0])
    assert not weights.changed
    with torch.no_grad():
        replica.model.scale.mul_(2)
    assert weights.changed


def test_a_buffer_that_is_replaced_in_each_batch_is_seen(replicas: Any) -> None:
    replica = replicas(model(), (1, 0))
    replica.model.register_buffer("count", torch.zeros(1))
    weights = replica.driver.weights
    weights.remember()
    for _ in range(4):  # every second tensor may be where the first one was
        with torch.inference_mode():
            replica.model.count = replica.model.count + 1
        assert weights.changed
