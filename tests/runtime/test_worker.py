"""A worker carries out the commands of its driver; both are threads of this process."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.memory import memory_channels
from lightning_hybrid.comm.protocol import (
    MESSAGES,
    Answer,
    Check,
    ClearGradients,
    ClipValues,
    Command,
    End,
    ForgetFailure,
    Free,
    GiveGradients,
    GiveOptimizer,
    GiveWeights,
    GradientNorm,
    Leaving,
    Reduce,
    Report,
    ScaleGradients,
    Step,
    SynchronizeBuffers,
    TakeGradients,
    TakeGroups,
    TakeOptimizers,
    TakeWeights,
    Unscale,
    ZeroGrad,
)
from lightning_hybrid.pipeline.stages import StageOptions
from lightning_hybrid.runtime.optimizers import groups_of, ship
from lightning_hybrid.runtime.worker import Worker

CPU = torch.device("cpu")
GRADIENTS = {"weight": torch.full((2, 3), 3.0), "bias": torch.tensor([4.0, -1.0])}


class Service:
    """A worker in a thread, and the driver's end of its channel."""

    def __init__(self) -> None:
        self.driver, there = memory_channels(("driver", "worker"))
        torch.manual_seed(0)
        self.module = nn.Linear(3, 2)
        mesh: Any = SimpleNamespace(
            coordinates=Coordinates(1, 1, 2), channel=lambda _: there, timeout=timedelta(minutes=1)
        )
        reports = {"name": lambda: "said", "broken": lambda: 1 / 0}
        self.worker = Worker(self.module, mesh, CPU, StageOptions(), None, reports)
        self.results: list[Any] = []
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.results.append(self.worker.serve())
        except Exception as error:
            self.results.append(error)

    def ask(self, command: Command) -> Answer:
        self.driver.send(command)
        return self.driver.receive(Answer)

    def close(self) -> Any:
        """Wait for the end. Returns what `serve` has returned or raised."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.results[0]


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    if not made.results:
        made.driver.send(Leaving(Failure("the test is over")))
        made.close()


@pytest.fixture
def trained(service: Service) -> Callable[[], torch.optim.Optimizer]:
    """Gives the worker an optimizer; returns a twin of it, which has the same gradients."""
    twin = nn.Linear(3, 2)
    twin.load_state_dict(service.module.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    data = ship([optimizer], dict(twin.named_parameters()), set())
    service.driver.send(TakeOptimizers(-1, data))
    service.driver.send(TakeGradients(False, GRADIENTS.items()))
    for name, parameter in twin.named_parameters():
        parameter.grad = GRADIENTS[name].clone()
    return lambda: optimizer


def weights(service: Service) -> dict[str, torch.Tensor]:
    return dict(service.ask(GiveWeights(["weight", "bias"])).tensors)


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def test_every_command_has_a_handler(service: Service) -> None:
    commands = {m for m in MESSAGES if issubclass(m, Command)}
    assert set(service.worker._handlers) == commands


def test_weights_travel_both_ways(service: Service) -> None:
    values = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    service.driver.send(TakeWeights(values.items()))
    assert all(torch.equal(values[name], value) for name, value in weights(service).items())


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


@pytest.mark.parametrize(
    ("commands", "change"),
    [
        ([], lambda o: None),
        ([ScaleGradients(0, 0.5)], lambda o: [p.grad.mul_(0.5) for p in parameters(o)]),
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
    for command in (*commands, Step(0), Step(0)):
        service.driver.send(command)
    change(optimizer)
    optimizer.step()
    optimizer.step()
    for found, wanted in zip(weights(service).values(), parameters(optimizer)):
        assert torch.equal(found, wanted)


def test_other_groups_come_with_a_step_or_before_it(service: Service, trained: Any) -> None:
    optimizer, names = trained(), {}
    names = {id(p): name for p, name in zip(parameters(optimizer), ("weight", "bias"))}
    for learning_rate in (0.2, 0.3):
        optimizer.param_groups[0]["lr"] = learning_rate
        groups = groups_of(optimizer, names)
        if learning_rate == 0.2:
            service.driver.send(Step(0, groups))
        else:
            service.driver.send(TakeGroups(0, groups))
            service.driver.send(Step(0))
        optimizer.step()
    for found, wanted in zip(weights(service).values(), parameters(optimizer)):
        assert torch.equal(found, wanted)
    state = service.ask(GiveOptimizer(0)).value
    momentum = optimizer.state[parameters(optimizer)[1]]["momentum_buffer"]
    assert torch.equal(state["bias"]["momentum_buffer"], momentum)


@pytest.mark.usefixtures("trained")
def test_norms_and_infinities_of_gradients_are_told(service: Service) -> None:
    norms = service.ask(GradientNorm(0, 2.0)).value
    assert norms["weight"].item() == pytest.approx(GRADIENTS["weight"].norm().item())
    assert service.ask(Unscale(0, torch.tensor(0.5))).value is False
    found = dict(service.ask(GiveGradients(["bias"])).tensors)
    assert torch.equal(found["bias"], GRADIENTS["bias"] / 2)
    service.driver.send(TakeGradients(False, [("bias", torch.tensor([torch.inf, 0.0]))]))
    assert service.ask(Unscale(0, torch.tensor(0.5))).value is True


def test_a_failure_is_told_with_every_answer_until_it_is_forgotten(service: Service) -> None:
    assert service.ask(Report("name")).value == "said"
    assert service.ask(Report("broken")).failure is not None
    for command in (Check(), Report("name"), GiveWeights(["weight"])):
        answer = service.ask(command)
        assert answer.failure is not None
        assert isinstance(answer.failure.exception(), ZeroDivisionError)
        assert not list(answer.tensors)
    service.driver.send(ForgetFailure())
    assert service.ask(Check()).failure is None


@pytest.mark.parametrize("command", [Reduce(0), SynchronizeBuffers(False), Free(0, 0)])
def test_a_worker_leaves_where_others_would_wait_for_it(service: Service, command: Command) -> None:
    # it has no network: not one of these commands can be carried out
    service.worker._networks = None  # type: ignore[assignment]
    service.driver.send(command)
    if isinstance(command, Free):  # in which nobody waits
        assert isinstance(service.ask(Check()).failure.exception(), TypeError)  # type: ignore[union-attr]
    else:
        assert isinstance(service.close(), TypeError)


def test_a_failed_command_leaves_nothing_of_its_tensors_behind(service: Service) -> None:
    values = {"no such name": torch.ones(2), "weight": torch.ones(2, 3)}
    service.driver.send(TakeWeights(values.items()))
    assert isinstance(service.ask(Check()).failure.exception(), KeyError)  # type: ignore[union-attr]


@pytest.mark.usefixtures("trained")
def test_nothing_steps_after_a_failure(service: Service) -> None:
    before = {name: value.clone() for name, value in weights(service).items()}
    service.ask(Report("broken"))
    service.driver.send(Step(0))
    service.driver.send(ForgetFailure())
    assert all(torch.equal(before[name], value) for name, value in weights(service).items())


def test_the_end_brings_the_results(service: Service) -> None:
    assert service.ask(End({"metric": 1})).failure is None
    assert service.close() == {"metric": 1}


def test_a_driver_that_leaves_is_heard_of(service: Service) -> None:
    service.driver.send(Leaving(Failure.of(ValueError("on purpose"), "rank 0")))
    assert isinstance(service.close(), ValueError)
