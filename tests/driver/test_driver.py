"""A driver and its workers train a network that is really cut, in one process."""

import threading
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driven import Model, Replica, batches, loss_of, model, train, train_one_device
from torch import Tensor, nn

from lightning_hybrid.comm.call_precision import CallPrecision
from lightning_hybrid.comm.protocol import GiveFailure
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.driver.driver import Driver
from lightning_hybrid.errors import HybridError, RemoteError

DEVICES = [(1, 0), (1, 2, 0), (1, 2, 1, 0)]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_losses_and_weights_are_those_of_one_device(
    replicas: Any, devices: tuple[int, ...], kind: Any
) -> None:
    module = model()
    reference = deepcopy(module)
    expected = train_one_device(reference, kind(reference.parameters(), lr=0.1))
    replica = replicas(module, devices)
    assert train(replica, kind(module.parameters(), lr=0.1)) == pytest.approx(expected, abs=1e-12)
    replica.end()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=1e-12)
    assert not replica.errors


def test_weights_and_gradients_of_workers_are_read_and_changed_as_ones_own(replicas: Any) -> None:
    module = model()
    reference, [value] = deepcopy(module), batches(1)
    loss_of(reference, reference.net(value)).backward()
    replica = replicas(module, (1, 2, 0))
    loss_of(module, replica(value)).backward()
    for mine, theirs in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            mine.mul_(2)
            theirs.mul_(2)
    torch.testing.assert_close(replica(value), reference.net(value), rtol=1e-12, atol=1e-12)


def test_a_parameter_of_another_rank_may_be_in_the_loss(replicas: Any) -> None:
    module = model()
    reference, [value] = deepcopy(module), batches(1)

    def loss(module: Model, output: Tensor) -> Tensor:
        return output.square().mean() + sum(p.square().sum() for p in module.net.parameters())

    loss(reference, reference.net(value)).backward()
    replica = replicas(module, (1, 0))
    replica.driver.begin_step(0)
    loss(module, replica(value)).backward()
    replica.driver.gradients.after_backward()
    for mine, theirs in zip(module.parameters(), reference.parameters()):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
def test_a_graph_of_a_chain_goes_on_with_the_numbers_around_it(devices: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Model(nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(3, 3), nn.Dropout()))))
    reference, [value] = deepcopy(module).double(), batches(1)
    replica = Replica(module.double(), value, devices, parts=1, continues_generators=True)
    found = []
    for call in (reference.net, replica):
        torch.manual_seed(5)
        found.append([torch.rand(()), call(value), torch.rand(())])
    replica.end()
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_a_layer_of_another_rank_may_be_removed() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.third(x if self.second is None else self.second(x))

    module = Model(Skips()).double()
    replica = Replica(module, batches(1)[0], (1, 2, 0))
    module.net.second = None
    with replica.driver.weights.gathered():
        names = set(module.state_dict())
    replica.driver.weights.scatter()
    replica.end()
    assert names == {
        "scale",
        *(f"net.{n}.{k}" for n in ("first", "third") for k in ("weight", "bias")),
    }


def test_an_error_of_a_worker_is_the_drivers(replicas: Any) -> None:
    module = model()
    replica = replicas(module, (1, 2, 0))

    def refuse(*_: Any) -> None:
        raise ValueError("on purpose")

    replica.modules[2].get_parameter("net.4.weight").register_hook(lambda _: refuse())
    loss_of(module, replica(batches(1)[0])).backward()
    with pytest.raises(ValueError, match="on purpose") as found:
        replica.driver.commands.ask(GiveFailure())
    assert isinstance(found.value.__cause__, RemoteError)
    assert "rank 2 (worker, replica 0, stage 1) failed" in str(found.value.__cause__)


@pytest.mark.parametrize(("where", "rank"), [("forward", 0), ("backward", 0), ("forward", 2)])
def test_who_catches_an_error_goes_on_as_on_one_device(
    replicas: Any, where: str, rank: int
) -> None:
    module = model()
    reference, [value] = deepcopy(module), batches(1)
    expected = loss_of(reference, reference.net(value))
    expected.backward()
    replica, raises = replicas(module, (1, 2, 0)), [True]

    def fail_once(*_: Any) -> None:
        if raises and raises.pop():
            raise ValueError("on purpose")

    engine = replica.workers[rank]._networks[0].engine if rank else replica.network.engine
    stage_for = engine.stage_for

    def failing_stage(*which: Any) -> Any:
        def stage(*arguments: Any) -> Any:
            outputs = stage_for(*which)(*arguments)
            if where == "forward":
                fail_once()
            else:
                outputs[0].register_hook(fail_once)
            return outputs

        return stage

    engine.stage_for = failing_stage
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(module, replica(value)).backward()
    for parameter in module.parameters():
        parameter.grad = None
    for _ in range(2):  # the first teaches the shapes, the second needs them
        loss = loss_of(module, replica(value))
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for mine, theirs in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, 2 * theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_worker_that_cannot_begin_a_forward_keeps_nobody_waiting(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, applied = replicas(model(), (1, 2, 0)), CallPrecision.applied

    def refused(precision: CallPrecision) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise TypeError("this device has no bfloat16")
        return applied(precision)

    with monkeypatch.context() as patch:
        patch.setattr(CallPrecision, "applied", refused)
        with pytest.raises(TypeError, match="no bfloat16"):
            replica(batches(1)[0])
    assert replica(batches(1)[0]).shape == (4, 3)  # the links are in step


def test_all_workers_hear_of_an_error_of_the_driver(replicas: Any) -> None:
    replica = replicas(model(), (1, 2, 0))
    replica.driver.abort(Failure.of(KeyError("on purpose"), "rank 0"))
    replica.close()
    assert [type(error) for error in replica.errors.values()] == [KeyError, KeyError]


def test_a_lost_worker_keeps_an_error_from_no_other(replicas: Any) -> None:
    replica = replicas(model(), (1, 2, 0))
    replica.ranks.kill(1)
    replica.driver.abort(Failure.of(KeyError("on purpose"), "rank 0"))
    replica.close()
    assert type(replica.errors[2]) is KeyError
    assert "Lost" in str(replica.errors[1])


def test_a_device_without_room_for_a_network_that_is_not_cut_yet_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(torch.Tensor, "to", full)
    driver: Any = SimpleNamespace(device=torch.device("meta"))
    with pytest.raises(HybridError, match=r"^Linear, .* no room on meta.*num_sanity_val_steps=0"):
        Driver.have_here(driver, nn.Linear(2, 2), whole=True)
