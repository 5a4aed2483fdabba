"""A signal does not interrupt an exchange of messages, and none is lost."""

import os
import signal
from collections.abc import Iterator

import pytest

from lightning_hybrid.comm.signals import (
    make_deferrable,
    restore_handlers,
    run_pending,
    signals_deferred,
    signals_ignored,
)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What happened; the handler of a user, made deferrable, adds to it."""
    events: list[str] = []

    def handler(*_: object) -> None:
        events.append("handler")

    before = signal.signal(signal.SIGUSR1, handler)
    make_deferrable()
    yield events
    restore_handlers()
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_waits_for_the_end_of_the_outermost_section(heard: list[str]) -> None:
    @signals_deferred
    def inner() -> None:
        send()
        heard.append("inner ends")

    @signals_deferred
    def outer() -> None:
        inner()
        heard.append("outer ends")

    outer()
    assert heard == ["inner ends", "outer ends", "handler"]


def test_a_signal_is_heard_after_a_section_that_fails(heard: list[str]) -> None:
    @signals_deferred
    def fails() -> None:
        send()
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fails()
    assert heard == ["handler"]


def test_outside_of_sections_a_signal_is_heard_at_once(heard: list[str]) -> None:
    send()
    heard.append("next line")
    assert heard == ["handler", "next line"]


def test_a_worker_ignores_signals(heard: list[str]) -> None:
    with signals_ignored():
        send()
    assert heard == []
    send()
    assert heard == ["handler"]


def test_a_handler_that_was_set_later_stays(heard: list[str]) -> None:
    def another(*_: object) -> None:
        heard.append("another")

    ours = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, another)
    restore_handlers()
    send()
    assert heard == ["another"]
    signal.signal(signal.SIGUSR1, ours)


def test_held_signals_wait_for_the_next_call(heard: list[str]) -> None:
    run_pending(hold=True)
    send()
    assert heard == []
    run_pending(hold=False)
    assert heard == ["handler"]
