"""Messages between two ranks: in order, whole, to the end, and of the kind that is expected."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import together

from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.heartbeat import Heartbeat
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import (
    Answer,
    Command,
    GiveFailure,
    GiveReport,
    Leaving,
    Message,
    Status,
    TakeWeights,
    ZeroGrad,
)
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import HybridError, RemoteError

Wires = Callable[..., Any]
FAILURE = Failure.of(ValueError("on purpose"), "rank 1")
WEIGHTS = {"a": torch.arange(5.0), "empty": torch.empty(0), "b": torch.ones(2, 3).T}


def ends(pair: Any) -> tuple[Channel, Channel]:
    return Channel(pair[0]), Channel(pair[1])


def test_messages_and_their_tensors_pass_between_heartbeats(wires: Wires) -> None:
    here, there = ends(wires().pair())
    heartbeat = Heartbeat([here], timedelta(seconds=0.01))

    def speak() -> None:
        for number in range(200):
            here.send(GiveReport(str(number)))
            here.send(TakeWeights(WEIGHTS.items()))
        here.flush()

    def hear() -> None:
        for number in range(200):
            assert there.receive(GiveReport).name == str(number)
            found = dict(there.receive(TakeWeights).tensors)
            assert found.keys() == WEIGHTS.keys()
            assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())

    together(speak, hear)
    heartbeat.close()


def test_a_rank_that_listens_late_hears_what_came_behind_many_heartbeats(wires: Wires) -> None:
    here, there = ends(wires().pair())
    for _ in range(400):
        here.send_still_alive()
    here.send(GiveReport("word"))
    assert there.receive(Command) == GiveReport("word")


def test_what_goes_with_the_next_message_comes_before_it_in_one_transfer(wires: Wires) -> None:
    here, there = ends(wires().pair())
    transfers: list[int] = []
    send = here._wire.send
    here._wire.send = lambda tensor: transfers.append(tensor.numel()) or send(tensor)  # type: ignore[method-assign,assignment,func-returns-value]
    sent = [ZeroGrad(0, True), GiveFailure(), ZeroGrad(1, False), ZeroGrad(2, True), GiveFailure()]
    for message in sent:
        here.send_with_next(message) if isinstance(message, ZeroGrad) else here.send(message)
    assert [there.receive(Command) for _ in sent] == sent
    assert len(transfers) == 3


def test_tensors_that_nobody_has_taken_are_passed_over(wires: Wires) -> None:
    here, there = ends(wires().pair())
    here.send(TakeWeights(WEIGHTS.items()))
    here.send(GiveReport("next"))
    name, _ = next(iter(there.receive(TakeWeights).tensors))
    assert name == "a"
    assert there.receive(GiveReport).name == "next"


def test_tensors_are_taken_one_by_one(wires: Wires) -> None:
    here, there = ends(wires().pair())
    values = {str(number): torch.full((4,), float(number)) for number in range(3)}
    here.send(TakeWeights(values.items()))
    arriving = iter(there.receive(TakeWeights).tensors)
    next(arriving)
    values["2"].fill_(9)  # it has not left yet
    assert [value[0].item() for _, value in arriving] == [1, 9]


def test_after_a_tensor_that_cannot_be_sent_the_next_message_arrives(wires: Wires) -> None:
    here, there = ends(wires().pair())
    values = {"a": torch.ones(3), "no memory": torch.ones(2, device="meta"), "b": torch.ones(4)}
    with pytest.raises(NotImplementedError, match="no data"):
        here.send(TakeWeights(values.items()))
    here.send(GiveReport("next"))
    found = dict(there.receive(TakeWeights).tensors)
    assert {name: len(value) for name, value in found.items()} == {"a": 3, "no memory": 2, "b": 4}
    assert there.receive(GiveReport).name == "next"


def test_what_is_not_expected_is_refused_by_name(wires: Wires) -> None:
    here, there = ends(wires().pair())
    here.send(Status())
    with pytest.raises(HybridError, match="Expected Answer from rank 0, and received Status"):
        there.receive(Answer)


def test_who_waits_for_a_rank_that_leaves_hears_why(wires: Wires) -> None:
    here, there = ends(wires().pair())
    there.send(Leaving(FAILURE))
    for _ in range(2):  # nothing more will come
        with pytest.raises(ValueError, match="on purpose") as found:
            here.receive(Message)
        assert isinstance(found.value.__cause__, RemoteError)


def test_a_sender_waits_where_the_peer_takes_nothing_for_long(wires: Wires) -> None:
    here, _ = ends(wires(2.0).pair())

    def speak() -> None:
        for _ in range(1000):
            here.send(GiveFailure())

    with pytest.raises(ConnectionLost, match="rank 1"):
        speak()
