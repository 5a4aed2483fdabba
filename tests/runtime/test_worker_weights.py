"""A worker's weights and gradients are what its driver makes them."""

import torch
from served import GRADIENTS, Service

from lightning_hybrid.comm.protocol import (
    Check,
    ClearGradients,
    GiveGradients,
    TakeGradients,
    TakeWeights,
)


def test_weights_travel_both_ways(service: Service) -> None:
    values = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    service.driver.send(TakeWeights(values.items()))
    assert all(torch.equal(values[name], value) for name, value in service.weights().items())


def test_gradients_are_set_added_given_and_cleared(service: Service) -> None:
    service.driver.send(TakeGradients(True, GRADIENTS.items()))
    service.driver.send(TakeGradients(True, GRADIENTS.items()))
    found = dict(service.ask(GiveGradients(["bias"])).tensors)
    assert torch.equal(found["bias"], 2 * GRADIENTS["bias"])
    service.driver.send(TakeGradients(False, GRADIENTS.items()))
    found = dict(service.ask(GiveGradients(["bias"])).tensors)
    assert torch.equal(found["bias"], GRADIENTS["bias"])
    service.driver.send(ClearGradients(["bias"]))
    service.ask(Check())
    assert service.module.bias.grad is None
