"""The groups of a replica: channels, links and goodbyes over real gloo groups."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import together

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.links import link_stages
from lightning_hybrid.comm.mesh import Mesh, make_world
from lightning_hybrid.comm.messages import Answer, Message, Status
from lightning_hybrid.comm.protocol import Check
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.errors import RemoteError

CPU = torch.device("cpu")
SPEC = TensorSpec((1,), torch.float32)


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
        driver.channel(pp_rank).send(Check())
        worker.channel(0).receive(Check)
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
        driver.channel(pp_rank).send(Check())
        worker.channel(0).receive(Check)
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
