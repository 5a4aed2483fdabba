"""The ring in memory joins the stages as the real one does."""

import pytest
import torch
from ranks import together

from lightning_hybrid.comm.memory import MemoryRing, memory_channels
from lightning_hybrid.comm.protocol import Answer, Check
from lightning_hybrid.comm.specs import TensorSpec
from lightning_hybrid.comm.transport import ConnectionLost

SPEC = TensorSpec((1,), torch.float32)


@pytest.mark.parametrize("devices", [(1, 0), (1, 2, 0), (1, 2, 1, 0), (0, 1, 0)])
def test_what_goes_round_the_ring_passes_every_stage_in_order(devices: tuple[int, ...]) -> None:
    ring = MemoryRing(devices)
    found = together(*(lambda d=d: stages_of(ring, devices, d) for d in set(devices)))
    assert sorted(value for seen in found for value in seen) == [*range(len(devices))]


def stages_of(ring: MemoryRing, devices: tuple[int, ...], device: int) -> list[float]:
    links, seen = ring.links(device), []
    last = len(devices) - 1
    if device == devices[last]:
        links[last].next.send([torch.zeros(1)])
    for stage in links:
        [value] = links[stage].previous.post([SPEC]).wait()
        seen.append(value.item())
        links[stage].next.send([value + 1])
    return seen


def test_the_neighbours_of_a_killed_rank_notice() -> None:
    ring = MemoryRing((1, 2, 0))
    ring.kill(2)
    with pytest.raises(ConnectionLost, match="Lost rank 2"):
        ring.links(1)[0].next.send([torch.zeros(1)])
    with pytest.raises(ConnectionLost, match="Lost rank 2"):
        ring.links(0)[2].previous.post([SPEC])
    ring.links(0)[2].next.send([torch.zeros(1)])  # to rank 1, which lives


def test_channels_pass_messages_both_ways() -> None:
    here, there = memory_channels(("driver", "worker"))
    here.send(Check())
    there.receive(Check)
    there.send(Answer(value=1))
    assert here.receive(Answer).value == 1
    assert (here.peer, there.peer) == ("worker", "driver")
