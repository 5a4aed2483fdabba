"""The user's optimizers see the gradients and states of all stages as one device has them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import TrainedBeside, gradients, model
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_hybrid._trees import rebuild
from lightning_hybrid.remote import unread
from lightning_hybrid.state import optimizers

DEVICES = [(1, 0), (1, 2, 0)]


def test_zero_grad_and_add_param_group_reach_the_workers(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 0))
    trained.mine.zero_grad()
    assert gradients(trained.module) == []
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for optimizer in (trained.mine, trained.theirs):
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.add_param_group({"params": [extra]})
    trained.theirs.zero_grad()
    trained.backward()
    trained.mine.step()
    trained.theirs.step()
    trained.replica.driver.weights.bring_into_module()
    with trained.replica.driver.remote.suspended():
        torch.testing.assert_close(trained.module.state_dict(), trained.reference.state_dict())


@pytest.mark.parametrize("devices", DEVICES)
def test_the_state_dict_is_that_of_one_device(replicas: Any, devices: tuple[int, ...]) -> None:
    trained = TrainedBeside(replicas, devices, AdamW)
    for optimizer in (trained.mine, trained.theirs):
        optimizer.step()
    torch.testing.assert_close(trained.mine.state_dict(), trained.theirs.state_dict())


def test_a_state_that_is_loaded_is_the_workers_too(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 0), AdamW)
    trained.theirs.step()
    trained.reference.load_state_dict(model().state_dict())
    trained.mine.load_state_dict(deepcopy(trained.theirs.state_dict()))
    for optimizer in (trained.mine, trained.theirs):
        optimizer.step()
    trained.replica.driver.weights.bring_into_module()
    with trained.replica.driver.remote.suspended():
        torch.testing.assert_close(trained.module.state_dict(), trained.reference.state_dict())


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 0)])
def test_states_that_are_in_a_file_are_read_by_the_ranks_that_need_them(
    replicas: Any, devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "_SMALL_BYTES", 0)
    trained = TrainedBeside(replicas, devices, AdamW)
    trained.theirs.step()
    trained.reference.load_state_dict(model().state_dict())
    reads: list[int] = []

    def left_in_a_file(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        memory = value.clone().reshape(-1).view(torch.uint8)

        def read() -> Tensor:
            reads.append(memory.numel())
            return memory

        return unread(torch.empty_like(value, device="meta"), read)

    trained.mine.load_state_dict(rebuild(deepcopy(trained.theirs.state_dict()), left_in_a_file))
    for optimizer in (trained.mine, trained.theirs):
        optimizer.step()
    assert len(reads) == 2 * len([*trained.module.net.parameters()])
    trained.replica.driver.weights.bring_into_module()
    with trained.replica.driver.remote.suspended():
        torch.testing.assert_close(trained.module.state_dict(), trained.reference.state_dict())


def test_optimizers_are_left_as_they_were(replicas: Any) -> None:
    trained = TrainedBeside(replicas, (1, 0))
    assert {"step", "zero_grad"} <= vars(trained.mine).keys()
    trained.optimizers.connect([])
    assert {"step", "zero_grad"}.isdisjoint(vars(trained.mine))
