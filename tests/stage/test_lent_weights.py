"""A worker lends its driver weights, and gets their gradients back."""

from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from in_memory import MemoryGroup
from torch import nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.stage.lent_weights import LendingLine, LentWeights


def test_values_go_to_the_driver_and_gradients_are_added_to_the_owner_s() -> None:
    """Weights in another order of memory or of another type, and those without a gradient."""
    torch.manual_seed(0)
    owner = [nn.Parameter(torch.randn(3, 2).t()), nn.Parameter(torch.randn(4))]
    driver = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    owner[1].grad = torch.ones(4)
    groups = {(1, 0): MemoryGroup(2), (0, 1): MemoryGroup(2)}

    def line(rank: int) -> LendingLine:
        mesh: Any = SimpleNamespace(
            coordinates=Coordinates(rank, 1, 2),
            siblings=lambda ends: groups[ends].of(ends.index(rank)),
        )
        return LendingLine(mesh, 1)

    lends, borrows = LentWeights(owner, line(1)), LentWeights(driver, line(0))
    with torch.no_grad():
        driver[1].data = driver[1].data.double()  # by user code, which the worker does not hear of
    gradients = [torch.randn(2, 3), torch.randn(4).double()]

    def worker() -> None:
        lends.lend()
        lends.take_back()

    thread = Thread(target=worker)
    thread.start()
    borrows.lend()
    borrows.give_back(gradients)
    thread.join(60)
    for mine, theirs in zip(driver, owner):
        assert torch.equal(mine.float(), theirs)
    for found, wanted in zip(owner, (gradients[0], gradients[1].float() + 1)):
        assert found.grad is not None
        assert torch.equal(found.grad, wanted)
