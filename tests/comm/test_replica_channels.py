"""What ranks of a replica say to each other, and to whom a goodbye goes."""

import pytest
import torch
from in_memory import MemoryReplica

from lightning_hybrid.comm.activation_links import link_stages
from lightning_hybrid.comm.connections import GroupHandle, GroupWire
from lightning_hybrid.comm.protocol import Answer, GiveFailure, Message, Status
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import RemoteError

CPU = torch.device("cpu")
FAILURE = Failure.of(ValueError("on purpose"), "a rank")


def test_there_is_one_channel_for_each_tag() -> None:
    driver, worker = MemoryReplica(2).lines
    assert driver.channel(1) is driver.channel(1)
    driver.channel(1, tag=2).send(Status())
    driver.channel(1).send(GiveFailure())
    worker.channel(0).receive(GiveFailure)
    worker.channel(0, tag=2).receive(Status)


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_everyone_who_waits_for_a_rank_that_leaves_hears_why(leaving: int) -> None:
    ranks = MemoryReplica(3).lines
    links = [link_stages(lines, (1, 2, 0), CPU) for lines in ranks]
    for worker in (1, 2):
        ranks[0].channel(worker)
    ranks[leaving].say_goodbye(FAILURE)
    channels = [ranks[0].channel(leaving)] if leaving else [r.channel(0) for r in ranks[1:]]
    for channel in channels:
        with pytest.raises(ValueError, match="on purpose"):
            channel.receive(Message)
    stage = (leaving - 1) % 3
    for other, side in (((stage + 1) % 3, "previous"), ((stage - 1) % 3, "next")):
        [both] = [table[other] for table in links if other in table]
        with pytest.raises(ValueError, match="on purpose"):
            getattr(both, side).receive_word(Status)


def test_a_driver_hears_of_a_worker_that_leaves_before_it_has_said_anything() -> None:
    driver, worker = MemoryReplica(2).lines
    worker.say_goodbye(FAILURE)
    with pytest.raises(ValueError, match="on purpose"):
        driver.channel(1).receive(Answer)


def test_a_worker_hears_of_a_driver_that_leaves_before_its_first_command() -> None:
    driver, *workers = MemoryReplica(3).lines
    driver.say_goodbye(FAILURE)
    for worker in workers:
        with pytest.raises(ValueError, match="on purpose"):
            worker.channel(0).receive(Message)


def test_a_peer_that_is_gone_keeps_no_goodbye_from_the_others() -> None:
    replica = MemoryReplica(3)
    driver, _, second = replica.lines
    for worker in (1, 2):
        driver.channel(worker)
    replica.kill(1)
    driver.say_goodbye(FAILURE)
    with pytest.raises(ValueError, match="on purpose") as found:
        second.channel(0).receive(Message)
    assert isinstance(found.value.__cause__, RemoteError)


def test_a_rank_that_has_left_already_leaves_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = MemoryReplica(3)
    driver, _, second = replica.lines
    closed = GroupWire(GroupHandle(None), 1, "rank 1")  # as after a later run of other sizes
    with monkeypatch.context() as patch:
        patch.setattr(driver, "wire", lambda *_: closed)
        driver.channel(1)
    driver.channel(2)
    driver.say_goodbye(FAILURE)
    with pytest.raises(ValueError, match="on purpose"):
        second.channel(0).receive(Message)


def test_a_goodbye_waits_for_nobody() -> None:
    driver, busy, _ = MemoryReplica(3, timeout_s=0.5).lines
    for _ in range(64):  # as many as a channel keeps
        driver.channel(1).send(GiveFailure())
    driver.say_goodbye(FAILURE)
    for _ in range(64):
        busy.channel(0).receive(GiveFailure)
    with pytest.raises(ValueError, match="on purpose"):
        busy.channel(0).receive(Message)
