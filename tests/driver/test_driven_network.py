"""What a driver keeps of the calls of a network, and of those that came to nothing."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import arguments, batches, model

from lightning_hybrid.driver.network_call import NetworkCall
from lightning_hybrid.graph import cut, network_partitions


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 1, 0)])
def test_calls_whose_outputs_are_dropped_are_forgotten_by_the_next_one(
    replicas: Any, devices: tuple[int, ...]
) -> None:
    replica, [value] = replicas(model(), devices), batches(1)
    for _ in range(3):
        replica(value)  # no backward
    output = replica(value)
    assert len(replica.network.calls) == 1
    output.sum().backward()
    assert not replica.network.calls


def test_each_graph_of_a_network_has_its_own_specialization(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    expected = module.net(value).detach()
    replica = replicas(module, (1, 0))
    first = replica.call
    graph = first.specialization.graph
    partitions = network_partitions(graph)
    codes = cut(graph, partitions, [len(partitions) // 2])
    replica.driver.distribution.distribute_again(replica.network, codes)
    second = NetworkCall(replica.network, replica.network.specialize(graph, 1))
    assert (first.specialization.number, second.specialization.number) == (0, 1)
    for call in (first, second):
        with torch.no_grad():
            [output] = call(arguments(call, value))
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_after_a_forward_that_failed_on_the_driver_the_next_one_is_computed(replicas: Any) -> None:
    module, [value] = model(), batches(1)
    reference, replica = deepcopy(module), replicas(module, (1, 0))
    weight = module.net[-2].weight
    good, weight.data = weight.data, torch.ones(5, 5, dtype=torch.float64)
    for _ in range(2):  # the shapes of a new key are exchanged again
        with pytest.raises(RuntimeError, match="shape"):
            replica.call(arguments(replica.call, value))
    weight.data = good
    [output] = replica.call(arguments(replica.call, value))
    torch.testing.assert_close(output, reference.net(value), rtol=1e-12, atol=1e-12)
    assert len(replica.network.calls) == 1
