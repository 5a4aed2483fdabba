"""A worker's weights and gradients are what its driver makes them."""

from dataclasses import replace
from pathlib import Path

import torch
from served import GRADIENTS, Service
from torch import nn

from lightning_hybrid.comm.protocol import (
    ClearGradients,
    End,
    FindFiles,
    GiveFailure,
    GiveGradients,
    ReadWeights,
    TakeGradients,
    TakeWeights,
)
from lightning_hybrid.remote import FileOfTensors, FilePart


def test_weights_travel_both_ways(service: Service) -> None:
    values = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    service.driver.send(TakeWeights(values.items()))
    assert all(torch.equal(values[name], value) for name, value in service.weights().items())


def test_a_worker_reads_what_it_finds_in_files(service: Service, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(8) + torch.arange(6.0).numpy().tobytes())
    file = FileOfTensors.at(f"{tmp_path / 'weights'}")
    other = replace(file, written_ns=file.written_ns - 1)
    assert service.ask(FindFiles(frozenset((file, other)))).value == {file}
    service.driver.send(ReadWeights({"weight": FilePart(file, 8)}))
    assert torch.equal(service.weights()["weight"], torch.arange(6.0).view(2, 3))


def test_gradients_are_set_added_given_and_cleared(service: Service) -> None:
    service.driver.send(TakeGradients(True, GRADIENTS.items()))
    service.driver.send(TakeGradients(True, GRADIENTS.items()))
    found = dict(service.ask(GiveGradients(["bias"])).tensors)
    assert torch.equal(found["bias"], 2 * GRADIENTS["bias"])
    service.driver.send(TakeGradients(False, GRADIENTS.items()))
    found = dict(service.ask(GiveGradients(["bias"])).tensors)
    assert torch.equal(found["bias"], GRADIENTS["bias"])
    service.driver.send(ClearGradients(["bias"]))
    service.ask(GiveFailure())
    assert service.module.bias.grad is None


def test_a_tied_weight_is_known_by_each_of_its_names() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = network[0].weight
    service = Service(network)
    gradient = torch.ones(2, 2)
    for name in ("0.weight", "1.weight"):
        service.driver.send(TakeGradients(True, {name: gradient}.items()))
        found = dict(service.ask(GiveGradients([name])).tensors)
        assert torch.equal(found[name], network[0].weight.grad)
    assert torch.equal(network[0].weight.grad, 2 * gradient)
    service.ask(End())
    service.close()
