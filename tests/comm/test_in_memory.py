"""The ring in memory joins the stages as the real one does."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from in_memory import MemoryReplica, memory_channels
from nccl_rules import StrictReplica
from ranks import together

from lightning_hybrid.comm.activation_links import link_stages
from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.protocol import Answer, GiveFailure
from lightning_hybrid.comm.tensor_specs import TensorSpec

CPU = torch.device("cpu")
SPEC = TensorSpec((1,), torch.float32)


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 0), (1, 2, 1, 0), (0, 1, 0)])
@pytest.mark.parametrize("kind", [MemoryReplica, partial(StrictReplica, blocking=False)])
def test_what_goes_round_the_ring_passes_every_stage_in_order(
    devices: tuple[int, ...], kind: Callable[[int], MemoryReplica]
) -> None:
    last = len(devices) - 1
    # who drops a link drops what the peer has not taken yet
    links = [link_stages(each, devices, CPU) for each in kind(max(devices) + 1).lines]

    def rank(device: int) -> list[float]:
        seen = []
        if device == devices[last]:
            links[device][last].next.send([torch.zeros(1)], [SPEC])
        for both in links[device].values():
            [value] = both.previous.post([SPEC]).wait()
            seen.append(value.item())
            both.next.send([value + 1], [SPEC])
        return seen

    found = together(*(lambda d=d: rank(d) for d in set(devices)))
    assert sorted(value for seen in found for value in seen) == [*range(len(devices))]


def test_the_neighbours_of_a_killed_rank_notice() -> None:
    replica = MemoryReplica(3)
    links = [link_stages(lines, (1, 2, 0), CPU) for lines in replica.lines]
    replica.kill(2)
    with pytest.raises(ConnectionLost, match="Lost rank 2"):
        links[1][0].next.send([torch.zeros(1)], [SPEC])
    with pytest.raises(ConnectionLost, match="Lost rank 2"):
        links[0][2].previous.post([SPEC])
    links[0][2].next.send([torch.zeros(1)], [SPEC])  # to rank 1, which lives


def test_channels_pass_messages_both_ways() -> None:
    here, there = memory_channels(("driver", "worker"))
    here.send(GiveFailure())
    there.receive(GiveFailure)
    there.send(Answer(value=1))
    assert here.receive(Answer).value == 1
    assert (here.peer, there.peer) == ("worker", "driver")
