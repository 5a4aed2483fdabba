"""A worker's optimizers do what one device's do."""

from typing import Any

import pytest
import torch
from served import GRADIENTS, Service
from torch import nn

from lightning_hybrid.comm.call_precision import CallPrecision
from lightning_hybrid.comm.protocol import (
    ClipNorm,
    ClipValues,
    Command,
    GiveGradients,
    GiveTensor,
    GradientNorm,
    StepOptimizer,
    TakeGradients,
    TakeOptimizers,
    Unscale,
    ZeroGrad,
)
from lightning_hybrid.state.optimizers import NamedGroups, groups_of, ship
from lightning_hybrid.state.sharded_checkpoint import TensorAddress


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize(
    ("commands", "change"),
    [
        ([], lambda o: None),
        (
            [ClipNorm(0, 2.0, 4.0, torch.float32)],
            lambda o: nn.utils.clip_grads_with_norm_(parameters(o), 2.0, torch.tensor(4.0)),
        ),
        ([ClipValues(0, 2.0)], lambda o: nn.utils.clip_grad_value_(parameters(o), 2.0)),
        ([ZeroGrad(0, False)], lambda o: o.zero_grad(False)),
        ([ZeroGrad(0, True)], lambda o: o.zero_grad(True)),
    ],
    ids=["plain", "scaled", "clipped", "zeroed", "none"],
)
def test_steps_are_those_of_one_device(
    service: Service, trained: Any, commands: list[Command], change: Any
) -> None:
    optimizer = trained()
    for command in (*commands, StepOptimizer(0), StepOptimizer(0)):
        service.driver.send(command)
    change(optimizer)
    optimizer.step()
    optimizer.step()
    for found, wanted in zip(service.weights().values(), parameters(optimizer)):
        assert torch.equal(found, wanted)


def test_a_step_is_surrounded_by_the_precision_of_the_driver(service: Service) -> None:
    twin = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(twin.parameters())
    shipped = ship([optimizer], dict(twin.named_parameters()), set())
    service.driver.send(TakeOptimizers((0,), *shipped))
    service.driver.send(TakeGradients(False, GRADIENTS.items()))
    double = CallPrecision("cpu", torch.bfloat16, autocast=False, default_dtype=torch.float64)
    for command in (StepOptimizer(0, precision=double), StepOptimizer(0)):
        service.driver.send(command)
        for name in ("weight", "bias"):
            [(_, step)] = service.ask(GiveTensor(TensorAddress(1, name, 0, "step"))).tensors
            assert step.dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32


def test_other_groups_come_with_a_step(service: Service, trained: Any) -> None:
    optimizer, names = trained(), {}
    names = {id(p): name for p, name in zip(parameters(optimizer), ("weight", "bias"))}
    for learning_rate in (0.2, 0.3):
        optimizer.param_groups[0]["lr"] = learning_rate
        service.driver.send(StepOptimizer(0, groups_of(optimizer, NamedGroups(names))))
        optimizer.step()
    for found, wanted in zip(service.weights().values(), parameters(optimizer)):
        assert torch.equal(found, wanted)
    [(_, found)] = service.ask(GiveTensor(TensorAddress(1, "bias", 0, "momentum_buffer"))).tensors
    assert torch.equal(found, optimizer.state[parameters(optimizer)[1]]["momentum_buffer"])


@pytest.mark.usefixtures("trained")
def test_norms_and_infinities_of_gradients_are_told(service: Service) -> None:
    [(_, norms)] = service.ask(GradientNorm(0, 2.0)).tensors
    assert norms.tolist() == pytest.approx([g.norm().item() for g in GRADIENTS.values()])
    assert not service.ask(Unscale(0, 0.5)).holds
    found = dict(service.ask(GiveGradients(["bias"])).tensors)
    assert torch.equal(found["bias"], GRADIENTS["bias"] / 2)
    service.driver.send(TakeGradients(False, [("bias", torch.tensor([torch.inf, 0.0]))]))
    assert service.ask(Unscale(0, 0.5)).holds
