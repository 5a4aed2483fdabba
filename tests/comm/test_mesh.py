"""The groups of a replica: channels, links and goodbyes over real gloo groups."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_rules import USUAL, strict
from ranks import together

from lightning_hybrid.comm import mesh as module
from lightning_hybrid.comm.activation_links import link_stages
from lightning_hybrid.comm.collectives import meet
from lightning_hybrid.comm.connections import ConnectionLost, start
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.mesh import Mesh, backend_on, make_world
from lightning_hybrid.comm.protocol import Answer, GiveFailure, Message, Status
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import PlanError, RemoteError

CPU = torch.device("cpu")
SPEC = TensorSpec((1,), torch.float32)


@pytest.fixture(autouse=True)
def _rules_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_group", strict(USUAL))


@pytest.fixture
def meshes() -> Iterator[Callable[[int, int], list[Mesh]]]:
    made: list[Mesh] = []

    def make(replicas: int, stages: int) -> list[Mesh]:
        store = dist.HashStore()
        made.extend(
            together(
                *(
                    lambda rank=rank: Mesh(
                        Coordinates(rank, replicas, stages),
                        store,
                        make_world(store, rank, replicas * stages),
                        "gloo",
                        timedelta(seconds=30),
                    )
                    for rank in range(replicas * stages)
                )
            )
        )
        return made

    yield make
    for mesh in made:
        mesh.shutdown()


def test_driver_and_workers_have_a_channel_each(meshes: Any) -> None:
    driver, *workers = meshes(1, 3)
    assert driver.channel(1) is driver.channel(1)
    for pp_rank, worker in enumerate(workers, start=1):
        driver.channel(pp_rank).send(GiveFailure())
        worker.channel(0).receive(GiveFailure)
        worker.channel(0).send(Answer(value=pp_rank))
    assert [driver.channel(p).receive(Answer).value for p in (2, 1)] == [2, 1]


def test_links_lead_round_the_ring_in_both_directions(meshes: Any) -> None:
    ranks = meshes(1, 3)
    links = {stage: both for m in ranks for stage, both in link_stages(m, (1, 2, 0), CPU).items()}
    for stage in range(3):
        after = links[(stage + 1) % 3].previous
        links[stage].next.send([torch.tensor([float(stage)])], [SPEC])
        links[stage].next.send_word(Status())
        after.send([torch.tensor([-float(stage)])], [SPEC])
        assert after.post([SPEC]).wait()[0].item() == stage
        assert links[stage].next.post([SPEC]).wait()[0].item() == -stage
        assert after.receive_word(Status) == Status()


def test_everyone_who_waits_for_a_rank_that_leaves_hears_why(meshes: Any) -> None:
    driver, first, second = ranks = meshes(1, 3)
    links = {stage: both for m in ranks for stage, both in link_stages(m, (1, 2, 0), CPU).items()}
    first.say_goodbye(Failure.of(ValueError("on purpose"), "rank 1"))
    for wait in (
        lambda: driver.channel(1).receive(Message),
        lambda: links[1].previous.receive_word(Status),  # the next stage
        lambda: links[2].next.receive_word(Status),  # the driver, for gradients of the inputs
    ):
        with pytest.raises(ValueError, match="on purpose") as found:
            wait()
        assert isinstance(found.value.__cause__, RemoteError)
    assert second.coordinates.pp_rank == 2


def test_a_peer_that_is_gone_keeps_no_goodbye_from_the_others(meshes: Any) -> None:
    driver, first, second = meshes(1, 3)
    for pp_rank, worker in ((1, first), (2, second)):
        driver.channel(pp_rank).send(GiveFailure())
        worker.channel(0).receive(GiveFailure)
    first.shutdown()
    driver.say_goodbye(Failure("failed"))
    with pytest.raises(RemoteError, match="failed"):
        second.channel(0).receive(Message)


def test_ranks_with_the_same_stages_share_a_group(meshes: Any) -> None:
    ranks = meshes(2, 2)
    values = [torch.tensor([float(mesh.coordinates.rank)]) for mesh in ranks]
    together(
        *(lambda m=m, v=v: m.data_parallel.allreduce([v]).wait() for m, v in zip(ranks, values))
    )
    assert [value.item() for value in values] == [2, 4, 2, 4]
    assert [mesh.drivers is not None for mesh in ranks] == [True, False, True, False]


@pytest.mark.parametrize("devices", [(1, 2, 0), (1, 2, 1, 0), (0, 1, 2, 0), (2, 0, 1, 2, 1, 0)])
def test_edges_have_met_where_they_are_made_and_nobody_waits_in_a_pass(
    meshes: Any, devices: tuple[int, ...]
) -> None:
    """NCCL's first operation on an edge waits for the other end: here this one comes alone."""
    ranks = meshes(1, 3)
    found = together(*(lambda m=mesh: link_stages(m, devices, CPU) for mesh in ranks))
    links = {stage: both for of_rank in found for stage, both in of_rank.items()}
    sent = [torch.tensor([1.0])]
    for stage in range(len(devices)):
        links[stage].next.send(sent, [SPEC])
        links[stage].previous.send(sent, [SPEC])
    for stage in range(len(devices)):
        assert links[stage].previous.post([SPEC]).wait() == sent
        assert links[stage].next.post([SPEC]).wait() == sent


def test_what_waits_on_the_device_can_be_ended_and_says_who_is_lost(meshes: Any) -> None:
    driver, worker = meshes(1, 2)
    wires = driver.wires((1, 0))
    lost = ConnectionLost("Lost rank 1. It is gone", "rank 1")
    driver.abort(lost)
    for act in (
        lambda: wires[0].activations.receive(torch.empty(1)),
        lambda: wires[1].activations.send(torch.empty(1)),
        lambda: start(lambda: driver.data_parallel.allreduce([torch.ones(1)]), peer="a rank"),
    ):
        with pytest.raises(ConnectionLost) as found:
            act()
        assert found.value is lost
    driver.channel(1).send(GiveFailure())  # words still pass
    worker.channel(0).receive(GiveFailure)


def test_a_rank_that_leaves_wakes_who_waits_for_its_tensors(meshes: Any) -> None:
    driver, worker = meshes(1, 2)
    arriving = driver.wires((1, 0))[0].activations.receive(torch.empty(1))
    worker.leave()
    with pytest.raises(ConnectionLost, match="rank 1"):
        arriving.wait()


@pytest.mark.parametrize("make", [lambda m: m.siblings((1, 0)), lambda m: m.wires((0, 1))])
def test_who_makes_a_group_does_not_wait_for_a_rank_that_is_gone(
    meshes: Any, make: Callable[[Mesh], Any]
) -> None:
    driver, worker = meshes(1, 2)
    gone = Timer(0.3, worker.control.drop)  # as its process, after the driver has begun
    gone.start()
    with pytest.raises(ConnectionLost, match="Lost rank 1 ") as found:
        make(driver)
    gone.join()
    assert not found.value.late


@pytest.mark.parametrize(
    ("device", "name", "backend"),
    [
        ("cpu", "gloo", "gloo"),
        ("cuda", "nccl", "nccl"),
        ("cuda", "cpu:gloo,cuda:nccl", "nccl"),
        ("cpu", "cpu:gloo, CUDA:NCCL", "gloo"),
    ],
)
def test_backends_may_be_named_for_each_kind_of_device(
    device: str, name: str, backend: str
) -> None:
    assert backend_on(torch.device(device), name) == backend


@pytest.mark.parametrize(
    ("device", "name"),
    [("cuda", "gloo"), ("cuda", "cpu:gloo"), ("cpu", "mpi"), ("cpu", "nccl"), ("xpu", "xccl")],
)
def test_a_backend_that_carries_no_tensors_of_the_device_is_refused_by_name(
    device: str, name: str
) -> None:
    with pytest.raises(PlanError, match=f"process_group_backend='{name}' names .* '{device}'"):
        backend_on(torch.device(device), name)


def test_a_rank_that_does_not_come_to_a_meeting_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WORLD_TIMEOUT", timedelta(seconds=1))
    store = dist.HashStore()
    here, there = together(*(lambda rank=rank: make_world(store, rank, 2) for rank in (0, 1)))
    with pytest.raises(ConnectionLost) as caught:
        meet(here)
    assert caught.value.late
    there.close()
