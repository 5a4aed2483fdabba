"""What workers are told and asked, and what must have happened on the driver before."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from crew import Crew
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_hybrid.comm import switches
from lightning_hybrid.comm.protocol import (
    Answer,
    Command,
    FreeCall,
    GiveFailure,
    GiveReport,
    StepOptimizer,
    TakeSwitches,
)
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.errors import HybridError, RemoteError
from lightning_hybrid.remote.proxy import RemoteKind


class NotedProxies:
    """Notes what commands have them do."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def flush(self) -> None:
        self.notes.append("flush")

    def outdate(self, *kinds: RemoteKind) -> None:
        self.notes += kinds


def passing(stages: int, *, passed: bool = True) -> Any:
    return SimpleNamespace(owned=[None] * stages, passed=passed)


def test_changes_travel_before_a_command_which_makes_stale_what_it_changes(crew: Crew) -> None:
    proxies: Any = NotedProxies()
    Commands(crew.workers, proxies).tell(StepOptimizer(1))
    assert proxies.notes == [
        "flush",
        RemoteKind.PARAMETER,
        RemoteKind.PARAMETER,
    ]  # of either worker
    assert [crew.heard(rank) for rank in (1, 2)] == [StepOptimizer(1), StepOptimizer(1)]


def test_settings_of_torch_reach_a_worker_before_the_next_command_after_a_change(
    crew: Crew,
) -> None:
    proxies: Any = NotedProxies()
    commands = Commands(crew.workers, proxies)
    commands.tell(GiveFailure())
    commands.tell(GiveFailure())
    with sdpa_kernel(SDPBackend.MATH):
        commands.tell(GiveReport("inside"))
        inside = switches()
    commands.tell(GiveReport("outside"))
    told, check, again, changed, first, back, last = (crew.heard_all(1) for _ in range(7))
    assert (told, check, again) == (TakeSwitches(switches()), GiveFailure(), GiveFailure())
    assert (changed, first) == (TakeSwitches(inside), GiveReport("inside"))
    assert (back, last) == (told, GiveReport("outside"))
    assert inside != switches()


def test_answers_come_in_the_order_of_the_ranks(crew: Crew) -> None:
    for rank in (2, 1):
        crew.answer(rank, Answer(value=f"of {rank}"))
    proxies: Any = NotedProxies()
    answers = Commands(crew.workers, proxies).ask(GiveReport("name"))
    assert [answer.value for answer in answers] == ["of 1", "of 2"]


def test_the_failure_of_any_worker_is_raised(crew: Crew) -> None:
    crew.answer(1, Answer())
    crew.answer(2, Answer(Failure.of(ValueError("on purpose"), "rank 2")))
    proxies: Any = NotedProxies()
    with pytest.raises(ValueError, match="on purpose") as found:
        Commands(crew.workers, proxies).ask(GiveFailure())
    assert isinstance(found.value.__cause__, RemoteError)


def test_answers_are_heard_where_what_is_computed_beside_fails(crew: Crew) -> None:
    for rank in (1, 2):
        for value in ("first", "second"):
            crew.answer(rank, Answer(value=value))
    proxies: Any = NotedProxies()
    commands = Commands(crew.workers, proxies)
    with pytest.raises(ZeroDivisionError):
        commands.ask_beside(GiveFailure(), lambda: 1 // 0)
    answers, found = commands.ask_beside(GiveFailure(), lambda: "here")
    assert [answer.value for answer in answers] == ["second", "second"]
    assert found == "here"


def test_where_workers_wait_for_another_stage_of_this_rank_nothing_is_sent(crew: Crew) -> None:
    proxies: Any = NotedProxies()
    commands = Commands(crew.workers, proxies)
    with crew.workers.passing(passing(2)):
        with pytest.raises(HybridError, match="in the middle of a pass"):
            commands.tell(FreeCall(0, 1))
        with pytest.raises(HybridError, match="in the middle of a pass"):
            crew.workers.send(1, FreeCall(0, 1))
    assert proxies.notes == []  # what was changed here is not lost
    with crew.workers.passing(passing(1)):  # a worker hears it after the pass
        commands.tell(FreeCall(0, 2))
    assert crew.heard(1) == FreeCall(0, 2)


def test_a_pass_that_fails_is_over(crew: Crew) -> None:
    with pytest.raises(KeyError), crew.workers.passing(passing(2)):
        raise KeyError
    crew.workers.send(1, GiveFailure())
    assert crew.heard(1) == GiveFailure()
    assert crew.workers.in_step


def test_workers_are_out_of_step_once_a_pass_was_left_in_its_middle(crew: Crew) -> None:
    with pytest.raises(KeyError), crew.workers.passing(passing(1, passed=False)):
        raise KeyError
    with crew.workers.passing(passing(1)):
        pass
    assert not crew.workers.in_step


def test_who_has_caught_the_error_of_an_exchange_gets_it_again_from_each_command(
    crew: Crew,
) -> None:
    """Workers still wait in it, and this rank would wait for their answers."""
    proxies: Any = NotedProxies()
    commands, error = Commands(crew.workers, proxies), MemoryError("on purpose")
    with pytest.raises(MemoryError), crew.workers.joined():
        raise error
    with pytest.raises(ValueError, match="later"), crew.workers.joined():
        raise ValueError("later")
    for ask in (commands.ask, commands.tell, partial(crew.workers.send, 1)):
        with pytest.raises(MemoryError) as found:
            ask(GiveFailure())
        assert found.value is error
    assert proxies.notes == []


def test_workers_are_out_of_step_once_some_have_heard_a_command_and_others_not(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies: Any = NotedProxies()
    commands, own = Commands(crew.workers, proxies), crew.workers.send
    no_memory = {1: False, 2: True}

    def send(rank: int, command: Command) -> None:
        if no_memory[rank]:
            raise MemoryError
        own(rank, command)

    monkeypatch.setattr(crew.workers, "send", send)
    with pytest.raises(MemoryError):
        commands.tell(GiveFailure())
    assert not crew.workers.in_step


def test_workers_are_in_step_where_none_has_heard_a_command(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it cannot be pickled."""

    def send(rank: int, command: Command) -> None:
        raise TypeError

    monkeypatch.setattr(crew.workers, "send", send)
    proxies: Any = NotedProxies()
    with pytest.raises(TypeError):
        Commands(crew.workers, proxies).tell(GiveFailure())
    assert crew.workers.in_step
