"""What every wire promises, over gloo and in memory."""

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
import torch
from ranks import GlooWires, together
from torch._C._profiler import _ExperimentalConfig

from lightning_hybrid.comm import connections
from lightning_hybrid.comm.connections import (
    ConnectionLost,
    GroupWire,
    StuckSends,
    connection_lost,
    start,
)
from lightning_hybrid.errors import HybridError

Wires = Callable[..., Any]
SHORT_S = 0.2


def test_tensors_arrive_in_the_order_they_were_sent(wires: Wires) -> None:
    here, there = wires().pair()
    sends = [here.send(torch.full((3,), float(index))) for index in range(20)]
    targets = [torch.empty(3) for _ in sends]
    for transfer in [there.receive(target) for target in targets]:
        transfer.wait()
    for transfer in sends:
        transfer.wait()
    assert [target[2].item() for target in targets] == [*range(20)]


def test_both_directions_are_independent(wires: Wires) -> None:
    here, there = wires().pair()
    found = torch.empty(2, 2)
    sends = [here.send(torch.ones(2)), there.send(torch.zeros(2))]
    there.receive(found[1]).wait()
    here.receive(found[0]).wait()
    [transfer.wait() for transfer in sends]
    assert found.tolist() == [[0, 0], [1, 1]]


def test_wires_between_the_same_ranks_do_not_mix(wires: Wires) -> None:
    ranks = wires()
    (a_here, a_there), (b_here, b_there) = ranks.pair(), ranks.pair()
    sends = [b_here.send(torch.tensor([2.0])), a_here.send(torch.tensor([1.0]))]
    found = torch.empty(2, 1)
    a_there.receive(found[0]).wait()
    b_there.receive(found[1]).wait()
    [transfer.wait() for transfer in sends]
    assert found.flatten().tolist() == [1, 2]


def test_a_receive_may_be_posted_ahead_and_blocks_until_the_send(wires: Wires) -> None:
    here, there = wires().pair()
    found = torch.empty(1)

    def receive() -> float:
        there.receive(found).wait()
        return found.item()

    assert together(receive, lambda: here.send(torch.tensor([7.0])).wait())[0] == 7


def test_a_send_is_over_only_when_the_peer_receives(wires: Wires) -> None:
    here, _ = wires(SHORT_S).pair()
    with pytest.raises(ConnectionLost, match="Lost rank 1"):
        here.send(torch.ones(1)).wait()


def test_a_transfer_that_is_dropped_takes_no_place(wires: Wires) -> None:
    here, there = wires(SHORT_S).pair()
    here.send(torch.ones(1))
    with pytest.raises(ConnectionLost):
        there.receive(torch.empty(1)).wait()


def test_a_peer_that_does_not_answer_is_late(wires: Wires) -> None:
    here, _ = wires(SHORT_S).pair()
    with pytest.raises(ConnectionLost, match="stopped answering") as found:
        here.receive(torch.empty(1)).wait()
    assert found.value.late
    assert found.value.peer == "rank 1"


def test_after_a_time_out_nothing_passes_any_more(wires: Wires) -> None:
    here, there = wires(SHORT_S).pair()
    with pytest.raises(ConnectionLost):
        here.receive(torch.empty(1)).wait()
    with pytest.raises(ConnectionLost):
        there.receive(torch.empty(1)).wait()


@pytest.mark.parametrize("posted", [True, False])
def test_a_peer_that_is_gone_is_named_at_once(wires: Wires, posted: bool) -> None:
    ranks = wires()
    here, there = ranks.pair()
    first = here.send(torch.ones(1))
    there.receive(torch.empty(1)).wait()  # they have met
    first.wait()
    transfer = here.receive(torch.empty(1)) if posted else None
    ranks.kill(1)
    with pytest.raises(ConnectionLost, match=r"Lost rank 1\. It was killed") as found:
        (transfer or here.receive(torch.empty(1))).wait()
    assert not found.value.late
    with pytest.raises(ConnectionLost):
        here.send(torch.ones(1)).wait()


def test_an_error_in_a_collective_names_no_peer() -> None:
    lost = connection_lost("a rank of another replica", RuntimeError("Broken pipe\n#0 c10::Error"))
    assert lost.peer is None
    assert "Broken pipe" in str(lost)
    assert "#0" not in str(lost)


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_a_tensor_that_a_backend_refuses_is_named_and_no_peer_is_lost(
    kind: type[Exception],
) -> None:
    def refuse(*_: Any) -> None:
        raise kind("Tensors must be CUDA and dense")

    with pytest.raises(HybridError, match="rank 1: Tensors must be CUDA") as found:
        start(refuse, [torch.zeros(2, 3, dtype=torch.int16)], peer="rank 1")
    assert "torch.int16 of shape (2, 3) on cpu" in str(found.value)
    assert not isinstance(found.value, ConnectionLost)


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_transfer_is_not_profiled_and_what_follows_is(all_threads: bool) -> None:
    def recorded(name: str) -> None:
        with torch.profiler.record_function(name):
            pass

    scope = _ExperimentalConfig(profile_all_threads=all_threads)
    with torch.profiler.profile(experimental_config=scope) as profile:
        start(lambda: recorded("transfer"), peer="rank 1")
        recorded("after")
    assert [event.key for event in profile.key_averages() if event.count] == ["after"]


def test_a_switch_of_recording_that_somebody_else_has_set_stays() -> None:
    switch = torch._C._autograd._enable_record_function
    switch(False)
    try:
        start(lambda: None, peer="rank 1")
        with torch.profiler.profile() as profile, torch.profiler.record_function("hidden"):
            pass
        assert not profile.key_averages()
    finally:
        switch(True)


# ---------------------------------------------------------------- sends that gloo has forgotten

WAIT_S = 30


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[GlooWires]:
    monkeypatch.setattr(connections, "GRACE_S", 0.1)
    monkeypatch.setattr(connections, "_LOOK_EVERY_S", 0.05)
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
