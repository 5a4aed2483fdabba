"""Tensors go from a worker to its driver, and from there to the worker."""

from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from in_memory import MemoryGroup
from torch import Tensor, nn

from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.stage.lending_line import LendingLine


def test_what_one_has_is_written_to_the_other_s_memory_in_any_order_of_it() -> None:
    torch.manual_seed(0)
    groups = {(1, 0): MemoryGroup(2), (0, 1): MemoryGroup(2)}

    def line(rank: int) -> LendingLine:
        mesh: Any = SimpleNamespace(
            coordinates=Coordinates(rank, 1, 2),
            siblings=lambda ends: groups[ends].of(ends.index(rank)),
        )
        return LendingLine(mesh, 1)

    weights: list[Tensor] = [nn.Parameter(torch.randn(3, 2).t()), nn.Parameter(torch.randn(4))]
    gradients = [torch.randn(2, 3), torch.randn(4)]
    taken, given = [torch.zeros(2, 3), torch.zeros(4)], [torch.zeros(3, 2).t(), torch.zeros(4)]
    worker, driver = line(1), line(0)

    def work() -> None:
        worker.to_driver(weights)
        worker.to_owner(given)

    thread = Thread(target=work)
    thread.start()
    driver.to_driver(taken)
    driver.to_owner(gradients)
    thread.join(60)
    for found, wanted in zip((*taken, *given), (*weights, *gradients)):
        assert torch.equal(found, wanted)
