"""A signal does not interrupt ranks that talk to each other, and none is lost."""

import os
import signal
from collections.abc import Iterator

import pytest

from lightning_hybrid.comm.signals import (
    conversation,
    left_to_the_driver,
    make_impatient,
    make_patient,
)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What happened; the handler of a user, made patient, adds to it."""
    events: list[str] = []

    def handler(*_: object) -> None:
        events.append("handler")

    before = signal.signal(signal.SIGUSR1, handler)
    make_patient()
    yield events
    make_impatient()
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_waits_for_the_end_of_the_outermost_conversation(heard: list[str]) -> None:
    @conversation
    def inner() -> None:
        send()
        heard.append("inner ends")

    @conversation
    def outer() -> None:
        inner()
        heard.append("outer ends")

    outer()
    assert heard == ["inner ends", "outer ends", "handler"]


def test_a_signal_is_heard_after_a_conversation_that_fails(heard: list[str]) -> None:
    @conversation
    def fails() -> None:
        send()
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fails()
    assert heard == ["handler"]


def test_without_a_conversation_a_signal_is_heard_at_once(heard: list[str]) -> None:
    send()
    heard.append("next line")
    assert heard == ["handler", "next line"]


def test_a_worker_leaves_signals_to_its_driver(heard: list[str]) -> None:
    with left_to_the_driver():
        send()
    assert heard == []
    send()
    assert heard == ["handler"]


def test_a_handler_that_was_set_later_stays(heard: list[str]) -> None:
    def another(*_: object) -> None:
        heard.append("another")

    patient = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, another)
    make_impatient()
    send()
    assert heard == ["another"]
    signal.signal(signal.SIGUSR1, patient)
