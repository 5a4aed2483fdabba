"""Sends that gloo has forgotten."""

from collections.abc import Iterator
from threading import Event

import pytest
import torch
from ranks import GlooWires

from lightning_hybrid.comm import stuck_sends
from lightning_hybrid.comm.connections import GroupWire
from lightning_hybrid.comm.stuck_sends import StuckSends

WAIT_S = 30


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[GlooWires]:
    monkeypatch.setattr(stuck_sends, "GRACE_S", 0.1)
    monkeypatch.setattr(stuck_sends, "_LOOK_EVERY_S", 0.05)
    made = GlooWires()
    yield made
    made.close()


def ends(wire: GroupWire, wait_s: float) -> list[str]:
    """Wait for so long, as for a send. Returns the reason for which the process would end."""
    reasons: list[str] = []
    over = Event()
    sends = StuckSends(lambda reason: (reasons.append(reason), over.set()))  # type: ignore[func-returns-value,arg-type]
    with sends.watched(wire.probe):
        over.wait(wait_s)
    sends.close()
    return reasons


def test_a_send_to_a_peer_that_is_gone_ends(gloo: GlooWires) -> None:
    here, _ = gloo.pair()
    assert isinstance(here, GroupWire)
    gloo.kill(1)
    [reason] = ends(here, WAIT_S)
    assert "Lost rank 1" in reason


def test_a_send_to_a_peer_that_is_there_may_wait(gloo: GlooWires) -> None:
    here, there = gloo.pair()
    assert isinstance(here, GroupWire)
    assert ends(here, 0.5) == []
    sent = here.send(torch.arange(3.0))  # what was probed still works
    received = torch.empty(3)
    there.receive(received).wait()
    sent.wait()
    assert received.tolist() == [0, 1, 2]
