"""The user's optimizers see the gradients and states of all stages as one device has them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from driven import Replica, batches, loss_of, model
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_hybrid._trees import rebuild
from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.remote import unread
from lightning_hybrid.state import optimizers

DEVICES = [(1, 0), (1, 2, 0)]


class Trained:
    """A replica and one device, with the same gradients.

    Args:
        replicas: makes replicas.
        devices: ``pp_rank`` of each stage.
        kind: of the optimizer.
    """

    def __init__(self, replicas: Any, devices: tuple[int, ...], kind: Any = SGD) -> None:
        self.module = model()
        self.reference = deepcopy(self.module)
        self.replica: Replica = replicas(self.module, devices)
        self.mine = kind(self.module.parameters(), lr=0.1)
        self.theirs = kind(self.reference.parameters(), lr=0.1)
        self.optimizers = self.replica.driver.optimizers
        self.optimizers.connect([self.mine])
        self.backward()

    def backward(self) -> None:
        [value] = batches(1)
        loss_of(self.module, self.replica(value)).backward()
        self.replica.driver.gradients.after_backward()
        loss_of(self.reference, self.reference.net(value)).backward()

    def assert_same_gradients(self) -> None:
        torch.testing.assert_close(
            gradients(self.module), gradients(self.reference), rtol=1e-12, atol=1e-12
        )


def gradients(module: nn.Module) -> list[Tensor]:
    found = [p.grad for p in module.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_gradients_are_clipped_by_their_common_norm(
    replicas: Any, devices: tuple[int, ...], order: float
) -> None:
    trained = Trained(replicas, devices)
    norm = trained.replica.driver.clipping.clip_norm(trained.mine, 0.01, order)
    expected = nn.utils.clip_grad_norm_(trained.reference.parameters(), 0.01, order)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    trained.assert_same_gradients()


def test_a_norm_that_must_be_finite_and_is_not_leaves_gradients_as_they_are(
    replicas: Any,
) -> None:
    trained = Trained(replicas, (1, 0))
    before = gradients(trained.module)
    trained.replica.modules[1].get_parameter("net.0.bias").grad[0] = torch.inf
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 for gradients is inf"):
        trained.replica.driver.clipping.clip_norm(trained.mine, 0.01, finite=True)
    [*finite] = zip(gradients(trained.module)[2:], before[2:], strict=True)
    assert all(torch.equal(now, then) for now, then in finite)


def test_gradients_are_clamped_on_all_ranks(replicas: Any) -> None:
    trained = Trained(replicas, (1, 2, 0))
    trained.replica.driver.clipping.clip_values(trained.mine, 0.001)
    nn.utils.clip_grad_value_(trained.reference.parameters(), 0.001)
    trained.assert_same_gradients()


def test_unscaled_gradients_are_not_those_that_were_read_before(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
    before = gradients(trained.module)
    assert not trained.replica.driver.clipping.unscale(
        trained.mine, torch.tensor(0.5, dtype=torch.float64)
    )
    assert all(torch.equal(a, b / 2) for a, b in zip(gradients(trained.module), before))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_that_is_not_finite_is_found_wherever_it_is(replicas: Any, rank: int) -> None:
    trained = Trained(replicas, (1, 0))
    trained.replica.driver.commands.ask(GiveFailure())  # the worker has its gradients
    worker = trained.replica.modules[1]
    bias = {0: trained.module.net[-2].bias, 1: worker.get_parameter("net.0.bias")}[rank]
    bias.grad[0] = torch.inf
    assert trained.replica.driver.clipping.unscale(
        trained.mine, torch.tensor(0.5, dtype=torch.float64)
    )


def test_zero_grad_and_add_param_group_reach_the_workers(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
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
    trained = Trained(replicas, devices, AdamW)
    for optimizer in (trained.mine, trained.theirs):
        optimizer.step()
    torch.testing.assert_close(trained.mine.state_dict(), trained.theirs.state_dict())


def test_a_state_that_is_loaded_is_the_workers_too(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0), AdamW)
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
    trained = Trained(replicas, devices, AdamW)
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
    trained = Trained(replicas, (1, 0))
    assert {"step", "zero_grad"} <= vars(trained.mine).keys()
    trained.optimizers.connect([])
    assert {"step", "zero_grad"}.isdisjoint(vars(trained.mine))


def test_a_copy_of_what_lightning_holds_speaks_to_the_same_workers(replicas: Any) -> None:
    trained = Trained(replicas, (1, 0))
    patched = {"clip_grad_by_norm": trained.optimizers.clip_norm}
    assert deepcopy(patched)["clip_grad_by_norm"].__self__ is trained.optimizers
