"""What a stage may count on of the link to its neighbour, over gloo, in memory and on one rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from in_memory import MemoryWire
from nccl_rules import StrictWire, check
from ranks import NAMES, together
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_hybrid.comm.activation_links import Link, LocalLink, PeerLink
from lightning_hybrid.comm.connections import ConnectionLost
from lightning_hybrid.comm.message_channel import Channel
from lightning_hybrid.comm.protocol import Answer, GradientPattern, Header, Status
from lightning_hybrid.comm.tensor_specs import TensorSpec
from lightning_hybrid.comm.travelling_errors import Failure
from lightning_hybrid.errors import HybridError

Wires = Callable[..., Any]
CPU, META = torch.device("cpu"), torch.device("meta")
SPEC = TensorSpec((2,), torch.float32)
FAILURE = Failure.of(ValueError("on purpose"), "rank 1")


def link(ranks: Any) -> tuple[Link, Link]:
    words, along, against, host = (ranks.pair() for _ in range(4))
    return (
        PeerLink(Channel(words[0]), along[0], against[0], host[0], CPU),
        PeerLink(Channel(words[1]), against[1], along[1], host[1], CPU),
    )


def strict_link(device: torch.device) -> tuple[Link, Link]:
    """Between two ranks whose stages are on that device, over wires with NCCL's rules."""
    words, host = (MemoryWire.pair(NAMES) for _ in range(2))
    along, against = (StrictWire.pair(MemoryWire.pair(NAMES), 30, device) for _ in range(2))
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for sender, receiver in (along, against[::-1]):  # as where the mesh is made
        together(partial(sender.send, byte), partial(receiver.receive, byte))
    return (
        PeerLink(Channel(words[0]), along[0], against[0], host[0], device),
        PeerLink(Channel(words[1]), against[1], along[1], host[1], device),
    )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).to(torch.int16).view(2, 3),
        torch.view_as_complex(torch.rand(3, 2)),
        torch.rand(4, 3).t(),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3.5, dtype=torch.float16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_numbers_of_every_type_and_order_pass_where_nccl_carries_them(tensor: Tensor) -> None:
    here, there = strict_link(CPU)
    specs = [TensorSpec.of(tensor), SPEC]
    for a, b in ((here, there), (there, here)):
        a.send([tensor, torch.ones(2)], specs)
        found, after = b.post(specs).wait()
        a.flush()
        assert torch.equal(found, tensor)
        assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
        assert after.tolist() == [1, 1]


def test_what_is_on_the_cpu_goes_past_the_wires_of_another_device_and_stays_there() -> None:
    here, there = strict_link(META)
    sent = [torch.ones(2, device=META), torch.get_rng_state(), torch.tensor([3, 1])]
    specs = [TensorSpec.of(tensor) for tensor in sent]
    here.send(sent, specs)
    found = there.post(specs).wait()
    here.flush()
    assert [tensor.device for tensor in found] == [META, CPU, CPU]
    assert all(torch.equal(a, b) for a, b in zip(found[1:], sent[1:]))
    zeros = [spec.zeros(META) for spec in specs]  # what a rank sends that has failed
    assert [tensor.device for tensor in zeros] == [META, CPU, CPU]


REFUSED = [
    (torch.get_rng_state(), ValueError, "CUDA and dense"),
    (torch.tensor([3, 1]), ValueError, "CUDA and dense"),
    (torch.zeros(3, dtype=torch.int16, device=META), TypeError, "int16"),
]
"""What NCCL takes in no message as it is."""


@pytest.mark.parametrize(("tensor", "error", "words"), REFUSED)
def test_a_strict_wire_refuses_what_a_link_carries(
    tensor: Tensor, error: type[Exception], words: str
) -> None:
    check(torch.ones(2, device=META), META)
    with pytest.raises(error, match=words):
        check(tensor, META)
    here, there = strict_link(META)
    here.send([tensor], [TensorSpec.of(tensor)])
    [found] = there.post([TensorSpec.of(tensor)]).wait()
    here.flush()
    assert (found.device, found.dtype) == (tensor.device, tensor.dtype)
    assert tensor.device == META or torch.equal(found, tensor)


def message(number: int) -> list[torch.Tensor]:
    return [torch.full((2,), float(number)), torch.full((2,), -float(number))]


def numbers(link: Link, count: int) -> list[float]:
    """The next messages, each checked to be whole."""
    found = []
    for first, second in (link.post([SPEC, SPEC]).wait() for _ in range(count)):
        assert torch.equal(first, -second)
        found.append(first[0].item())
    return found


def test_further_messages_may_be_sent_before_the_first_is_taken(wires: Wires) -> None:
    here, there = link(wires())
    for number in range(3):
        here.send(message(number), [SPEC, SPEC])
    assert numbers(there, 3) == [0, 1, 2]
    here.flush()


def test_further_receives_may_be_posted_before_the_first_arrives(wires: Wires) -> None:
    here, there = link(wires())
    posted = [there.post([SPEC, SPEC]) for _ in range(3)]
    for number in range(3):
        here.send(message(number), [SPEC, SPEC])
    assert [arriving.wait()[0][0].item() for arriving in posted] == [0, 1, 2]


def test_a_sender_bounds_its_queue_and_waits_where_nobody_takes_anything(wires: Wires) -> None:
    here, _ = link(wires(2.0))
    for number in range(2):
        here.flush(left=1)
        here.send(message(number), [SPEC, SPEC])
    with pytest.raises(ConnectionLost, match="rank 1"):
        here.flush(left=1)


def test_a_bounded_queue_moves_on_when_the_peer_has_taken_enough(wires: Wires) -> None:
    here, there = link(wires())

    def send() -> None:
        for number in range(10):
            here.flush(left=1)
            here.send(message(number), [SPEC, SPEC])
        here.flush()

    assert together(send, lambda: numbers(there, 10))[1] == [*range(10)]


def test_what_was_sent_is_kept_until_it_is_taken_and_no_longer(wires: Wires) -> None:
    here, there = link(wires())
    sent = [torch.ones(2), -torch.ones(2)]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in sent]
    here.send(sent, [SPEC, SPEC])
    sent.clear()
    assert not any(storage.expired() for storage in storages)
    assert numbers(there, 1) == [1]
    here.flush()
    assert all(storage.expired() for storage in storages)


def test_a_flushed_link_has_nothing_on_its_way(wires: Wires) -> None:
    here, _ = link(wires(2.0))
    here.flush()
    here.send(message(1), [SPEC, SPEC])
    with pytest.raises(ConnectionLost):
        here.flush()


def test_words_and_answers_do_not_mix(wires: Wires) -> None:
    """An answer that nobody has heard yet does not stand before the words of a later pass."""
    ranks = wires()
    worker_end, driver_end = (Channel(wire) for wire in ranks.pair())
    worker, driver = link(ranks)
    worker_end.send(Answer(value="of an earlier command"))
    worker.send_word(Status(FAILURE))
    worker_end.send(Answer(value="of the next one"))
    worker.send_word(GradientPattern([True]))
    assert driver.receive_word(Status).failure == FAILURE
    assert driver.receive_word(GradientPattern).present == [True]
    assert driver_end.receive(Answer).value == "of an earlier command"
    assert driver_end.receive(Answer).value == "of the next one"


def test_words_of_two_edges_between_the_same_ranks_do_not_mix(wires: Wires) -> None:
    ranks = wires()
    (a_here, a_there), (b_here, b_there) = link(ranks), link(ranks)
    a_here.send_word(Header([SPEC]))
    b_here.send_word(Status())
    assert b_there.receive_word(Status).failure is None
    assert a_there.receive_word(Header).specs == [SPEC]


def test_another_word_than_expected_is_refused_by_name() -> None:
    here, there = LocalLink.pair()
    here.send_word(Status())
    with pytest.raises(HybridError, match=r"Expected Header .* found Status"):
        there.receive_word(Header)


def test_stages_of_one_rank_hand_tensors_on_in_order_without_a_graph() -> None:
    here, there = LocalLink.pair()
    value = torch.ones(2, requires_grad=True) * 2
    for factor in (1, 2):
        here.send([value * factor], [SPEC])
    here.flush()
    found = [there.post([SPEC]).wait()[0] for _ in range(2)]
    assert [tensor.tolist() for tensor in found] == [[2, 2], [4, 4]]
    assert not any(tensor.requires_grad for tensor in found)
