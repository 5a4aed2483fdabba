"""A worker carries out the commands of its driver; both are threads of this process."""

import pytest
import torch
from served import Service

from lightning_hybrid.comm.protocol import (
    MESSAGES,
    Command,
    End,
    ForgetFailure,
    FreeCall,
    GiveFailure,
    GiveReport,
    GiveWeights,
    Leaving,
    Reduce,
    StepOptimizer,
    SynchronizeBuffers,
    TakeWeights,
)
from lightning_hybrid.comm.travelling_errors import Failure


def test_every_command_has_a_handler(service: Service) -> None:
    commands = {m for m in MESSAGES if issubclass(m, Command)}
    assert set(service.worker._handlers) == commands


def test_a_failure_is_told_with_every_answer_until_it_is_forgotten(service: Service) -> None:
    assert service.ask(GiveReport("name")).value == "said"
    assert service.ask(GiveReport("broken")).failure is not None
    for command in (GiveFailure(), GiveReport("name"), GiveWeights(["weight"])):
        answer = service.ask(command)
        assert answer.failure is not None
        assert isinstance(answer.failure.exception(), ZeroDivisionError)
        assert not list(answer.tensors)
    service.driver.send(ForgetFailure())
    assert service.ask(GiveFailure()).failure is None


@pytest.mark.parametrize("command", [Reduce(0), SynchronizeBuffers(False), FreeCall(0, 0)])
def test_a_worker_leaves_where_others_would_wait_for_it(service: Service, command: Command) -> None:
    # it has no network: not one of these commands can be carried out
    service.worker._networks = None  # type: ignore[assignment]
    service.driver.send(command)
    if isinstance(command, FreeCall):  # in which nobody waits
        assert isinstance(service.ask(GiveFailure()).failure.exception(), TypeError)  # type: ignore[union-attr]
    else:
        assert isinstance(service.close(), TypeError)


def test_a_failed_command_leaves_nothing_of_its_tensors_behind(service: Service) -> None:
    values = {"no such name": torch.ones(2), "weight": torch.ones(2, 3)}
    service.driver.send(TakeWeights(values.items()))
    assert isinstance(service.ask(GiveFailure()).failure.exception(), KeyError)  # type: ignore[union-attr]


@pytest.mark.usefixtures("trained")
def test_nothing_steps_after_a_failure(service: Service) -> None:
    before = {name: value.clone() for name, value in service.weights().items()}
    service.ask(GiveReport("broken"))
    service.driver.send(StepOptimizer(0))
    service.driver.send(ForgetFailure())
    assert all(torch.equal(before[name], value) for name, value in service.weights().items())


def test_it_ends_with_the_run(service: Service) -> None:
    assert service.ask(End()).failure is None
    assert service.close() is None


def test_a_driver_that_leaves_is_heard_of(service: Service) -> None:
    service.driver.send(Leaving(Failure.of(ValueError("on purpose"), "rank 0")))
    assert isinstance(service.close(), ValueError)
