"""A network that is cut at other places in the middle of a run trains on as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driven import Replica, batches, loss_of, model
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.driver import weights as files
from lightning_hybrid.remote import is_vacant

slow = pytest.mark.conformance
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "in parts": lambda parameters: AdamW(parameters, lr=0.05),
    "with momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "whole": lambda parameters: LBFGS(parameters, lr=0.1, max_iter=2),
}


@pytest.fixture(params=[True, False], ids=["one host", "several hosts"])
def _hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(files, "read_files", lambda _: None)


def step(
    module: Any, optimizer: Optimizer, call: Callable[[Tensor], Tensor], value: Tensor
) -> None:
    """One step of a replica, or of one device."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module, call(value))
        loss.backward()
        return loss

    optimizer.step(closure)


def in_parts(module: Any) -> Callable[[Tensor], Tensor]:
    """One device that runs the network once per micro-batch."""
    return lambda value: torch.cat([module.net(part) for part in value.chunk(2)])


def numbers(optimizer: Optimizer) -> list[Tensor]:
    """All of its states."""
    states = optimizer.state_dict()["state"].values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.usefixtures("_hosts")
@pytest.mark.parametrize(
    ("devices", "cuts", "kind"),
    [
        ((1, 0), [(1, 4), (3, 4)], "in parts"),
        ((1, 2, 0), [(1, 2, 4), (2, 3, 4)], "whole"),
        pytest.param((1, 2, 0), [(1, 2, 4), (2, 3, 4)], "in parts", marks=slow),
        pytest.param((1, 0), [(3, 4), (1, 4)], "with momentum", marks=slow),
    ],
)
def test_weights_and_states_are_those_of_one_device_before_and_after(
    replicas: Callable[..., Replica],
    kind: str,
    devices: tuple[int, ...],
    cuts: list[tuple[int, ...]],
) -> None:
    module, reference = model(), model()
    replica = replicas(module, devices, ends=cuts[0], trains=True)
    mine = OPTIMIZERS[kind](module.parameters())
    theirs = OPTIMIZERS[kind](reference.parameters())
    kept = module.net[2].weight
    replica.driver.optimizers.connect([mine])
    for number, value in enumerate(batches(6)):
        if number in (2, 4):
            replica.begin_other_stages()
        replica.driver.begin_step(number)
        if number in (2, 4):
            replica.cut(cuts[1 if number == 2 else 0])
        step(module, mine, replica, value)
        step(reference, theirs, in_parts(reference), value)
        # the object that code has kept is still the weight, whoever owns it now
        torch.testing.assert_close(kept.clone(), reference.net[2].weight, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        dict(module.state_dict()), dict(reference.state_dict()), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(numbers(mine), numbers(theirs), rtol=0, atol=1e-10)


@pytest.mark.usefixtures("_hosts")
def test_gradients_of_an_unfinished_window_are_not_lost(replicas: Callable[..., Replica]) -> None:
    module, reference = model(), model()
    replica = replicas(module, (1, 0), ends=(1, 4), trains=True)
    mine, theirs = (AdamW(m.parameters(), lr=0.05) for m in (module, reference))
    replica.driver.optimizers.connect([mine])
    for number, value in enumerate(batches(4)):
        if number == 1:
            replica.begin_other_stages()
        replica.driver.begin_step(number)
        if number == 1:
            replica.cut((3, 4))
        for each, call in ((module, replica), (reference, in_parts(reference))):
            loss_of(each, call(value)).backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
    expected = {name: p.grad for name, p in reference.named_parameters()}
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)
    mine.step()
    theirs.step()
    torch.testing.assert_close(
        dict(module.state_dict()), dict(reference.state_dict()), rtol=0, atol=1e-10
    )


def test_a_worker_has_memory_for_its_new_stage_alone(replicas: Callable[..., Replica]) -> None:
    replica = replicas(model(), (1, 0), ends=(3, 4), trains=True)
    replica.begin_other_stages()
    replica.cut((1, 4))
    replica.driver.commands.ask(GiveFailure())  # it has done what it was told
    weights = [replica.modules[1].get_parameter(f"net.{2 * number}.weight") for number in range(4)]
    assert [is_vacant(weight) for weight in weights] == [False, True, True, True]
