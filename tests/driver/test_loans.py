"""What workers lend the driver travels from device to device, and all of it arrives."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Model, batches, loss_of, train
from noted_messages import noted
from test_tied_weights import Tied


def test_no_tensor_that_the_driver_borrows_travels_with_messages(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are on wires for tensors of devices; what is told are integers."""
    module, told = Model(Tied()).double(), noted(monkeypatch)
    replica = replicas(module, (1, 0))
    train(replica, torch.optim.SGD(module.parameters(), lr=0.1))
    first = [name for name, *_ in told].index("StepOptimizer")
    later = told[first + 1 :]
    steady = {"Forward", "LendTensors", "Backward", "TakeLentGradients", "StepOptimizer"}
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
            replica.driver.gradients.bring_to_owners()
            one.net.first.weight.square().sum().backward()
    for name, parameter in reference.named_parameters():
        mine = module.get_parameter(name).grad
        torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=1e-12, msg=name)


def test_what_the_user_s_code_reads_travels_as_activations_do(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moving average of the weights, and norms of the gradients, after each backward."""
    module = Model(Tied()).double()
    reference, replica = deepcopy(module), replicas(module, (1, 2, 0))
    averages = [[p.detach().clone() for p in one.parameters()] for one in (module, reference)]
    told = noted(monkeypatch)
    for step, value in enumerate(batches(3)):
        replica.driver.begin_step(step)
        for one, mine, outputs in (
            (module, averages[0], replica(value)),
            (reference, averages[1], reference.net(value)),
        ):
            loss_of(one, outputs).backward()
            replica.driver.gradients.after_backward()
            with torch.no_grad():
                for average, parameter in zip(mine, one.parameters()):
                    average.lerp_(parameter, 0.5)
                    assert parameter.grad is not None
                    average += parameter.grad.norm()
                    parameter -= parameter.grad
    torch.testing.assert_close(*averages, rtol=0, atol=1e-12)
    assert "LendTensors" in {name for name, *_ in told}
    # (what code writes goes to the owners by a message)
    assert {name for name, _, tensors in told if tensors} <= {"TakeWeights"}
