"""Every rank gets the numbers of one, whatever their types, orders and sizes."""

from typing import Any

import pytest
import torch
from nccl_rules import StrictGroup
from ranks import gloo_groups, together
from torch import Tensor

from lightning_hybrid.stage import gradient_averaging as broadcasts
from lightning_hybrid.stage.gradient_averaging import Broadcasts

LARGE = broadcasts._LARGE_BYTES


def tensors(rank: int) -> list[Tensor]:
    """The same on all ranks, in the numbers of each; one lies in another order on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    turned = torch.randn(3, 5, 2, 2, generator=generator)
    large = torch.randn(LARGE // 32, 2, 4, generator=generator)
    if rank == 1:
        turned = turned.to(memory_format=torch.channels_last)
        large = large.transpose(1, 2).contiguous().transpose(1, 2)
    return [
        torch.randn((), generator=generator),
        torch.randint(-5, 5, (7,), generator=generator).short(),
        torch.randn(3, generator=generator, dtype=torch.complex64),
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.randn(2, 3, generator=generator).bfloat16(),
        torch.empty(0),
        turned,
        large,
        torch.randn(LARGE // 4, generator=generator),
        torch.randn(LARGE // 8, generator=generator, dtype=torch.complex64).conj(),
    ]


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("most", [broadcasts.MESSAGE_BYTES, 100])
def test_every_rank_has_the_numbers_of_one(
    source: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcasts, "MESSAGE_BYTES", most)
    groups: list[Any] = [StrictGroup(group) for group in gloo_groups(60)]

    def send(rank: int) -> tuple[list[Tensor], list[int]]:
        mine, sender = tensors(rank), Broadcasts(groups[rank])
        before = [tensor.data_ptr() for tensor in mine]
        buffers = []
        for _ in range(2):
            sender.send(mine, source)
            buffers.append(sender._buffer.data_ptr())
        assert before == [tensor.data_ptr() for tensor in mine]
        assert buffers[0] == buffers[1]
        assert sender._buffer.numel() <= max(most, 4 * 60)
        return mine, before

    found = together(lambda: send(0), lambda: send(1))
    for numbers, _ in found:
        for tensor, wanted in zip(numbers, tensors(source), strict=True):
            assert torch.equal(tensor, wanted)


def test_large_tensors_need_no_memory_beside_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = gloo_groups(60)

    def send(rank: int) -> int:
        sender = Broadcasts(groups[rank])
        sender.send([torch.full((LARGE,), float(rank)), torch.zeros(3)])
        return sender._buffer.numel()

    assert together(lambda: send(0), lambda: send(1)) == [12, 12]
