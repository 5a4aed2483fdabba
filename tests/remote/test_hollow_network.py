"""While a network is captured its tensors are ordinary ones without memory, and then as before."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from deferring import build, made, pair
from torch import nn

from lightning_hybrid._torch.tensors import storage_key
from lightning_hybrid.capture.capture import Capture
from lightning_hybrid.capture.watched_calls import own_forward
from lightning_hybrid.graph.graph import NetworkGraph
from lightning_hybrid.graph.partition import network_partitions
from lightning_hybrid.profiling.measure import measure
from lightning_hybrid.remote.deferred import is_deferred, is_of_one_rank, offload, value_of
from lightning_hybrid.remote.hollow_network import Hollow

CPU, META = torch.device("cpu"), torch.device("meta")


def states(network: nn.Module) -> list[Any]:
    """The classes and attributes of all tensors."""
    return [(type(t), dict(vars(t))) for t in (*network.parameters(), *network.buffers())]


def test_inside_a_tensor_without_memory_is_ordinary_the_same_object_and_empty() -> None:
    network, _ = build(pair)
    weight, bias = network[0].weight, network[0].bias
    offload(bias, "net.0.bias", "on rank 1")
    before = states(network)
    with Hollow(network, CPU):
        assert network[0].weight is weight
        assert {type(p) for p in network.parameters()} == {nn.Parameter}
        assert (weight.shape, weight.stride(), weight.device) == ((5, 4), (4, 1), CPU)
        assert weight.untyped_storage().nbytes() == 0
        for tensor in (weight, bias):
            with pytest.raises(RuntimeError, match="out of bounds for storage"):
                tensor[0]
    assert states(network) == before
    assert torch.equal(value_of(weight), made(pair)[0].weight)


def test_it_looks_the_same_each_time() -> None:
    network, _ = build(pair)
    hollow, seen = Hollow(network, CPU), []
    for _ in range(2):
        with hollow:
            seen.append([storage_key(p.untyped_storage()) for p in network.parameters()])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 4


def test_a_network_without_memory_is_captured_and_measured() -> None:
    network, _ = build(pair)
    x, graphs = torch.ones(2, 4), list[NetworkGraph]()

    def see(graph: NetworkGraph, values: Sequence[Any]) -> Sequence[Any]:
        graphs.append(graph)
        raise KeyError("seen, and not to be run")

    with Hollow(network, CPU), pytest.raises(KeyError):
        Capture(network, own_forward(network), see)((x,), {})
    profile = measure(graphs[0], network_partitions(graphs[0]), [x], repeats=1)
    assert profile.parameter_bytes == [100, 72]
    assert all(map(is_deferred, network.parameters()))


def test_lifted_and_after_an_error_tensors_are_what_they_were() -> None:
    network, _ = build(pair)
    before, hollow = states(network), Hollow(network, CPU)

    def run() -> None:
        with hollow.lifted():
            assert states(network) == before
        assert not any(map(is_deferred, network.parameters()))
        raise KeyError("on purpose")

    with pytest.raises(KeyError), hollow:
        run()
    assert states(network) == before


def test_what_has_its_memory_where_the_network_runs_keeps_it() -> None:
    network = made(pair)
    expected = network(torch.ones(1, 4))
    with Hollow(network, CPU):
        assert torch.equal(network(torch.ones(1, 4)), expected)


def test_what_waits_on_another_device_comes_back_as_it_was() -> None:
    """As on GPUs, where the network waits on the CPU until it is cut."""
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    before, numbers = states(network), {n: t.clone() for n, t in network.state_dict().items()}
    with Hollow(network, META):
        assert {t.device for t in (*network.parameters(), *network.buffers())} == {META}
    assert states(network) == before
    assert not any(map(is_of_one_rank, network.parameters()))
    torch.testing.assert_close(dict(network.state_dict()), numbers, rtol=0, atol=0)


def test_what_was_made_for_one_rank_is_so_afterwards() -> None:
    network, deferral = build(pair)
    deferral.make(network[0].weight)
    with Hollow(network, META):
        pass
    assert all(map(is_of_one_rank, network.parameters()))
