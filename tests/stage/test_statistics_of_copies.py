"""Two copies of a stage end with the running statistics of one device, the same bits on both."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from capturing import graph_of
from ranks import gloo_groups, together
from torch import nn

from lightning_hybrid.comm.connections import GroupHandle
from lightning_hybrid.graph import cut_at, make_stages
from lightning_hybrid.stage.statistics_of_copies import StatisticsOfCopies


@pytest.fixture(scope="module")
def groups() -> Iterator[list[Any]]:
    handles = [GroupHandle(group) for group in gloo_groups(30)]
    yield handles
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_copies_end_with_the_statistics_of_one_device(
    groups: list[Any], momentum: float | None, microbatches: int
) -> None:
    torch.manual_seed(1)
    alone = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3)).double()
    parts = [2 + torch.randn(4, 3, dtype=torch.float64) for _ in range(2 * microbatches)]
    copies = [deepcopy(alone) for _ in groups]
    codes = cut_at(graph_of(deepcopy(alone), parts[0]), [])
    for part in parts:
        alone(part)

    def train(number: int) -> None:
        statistics = StatisticsOfCopies(copies[number], lambda: groups[number])
        [stage] = make_stages(codes, copies[number], torch.device("cpu"))
        for begin in (0, microbatches):
            for m in range(number, microbatches, 2):
                with statistics.noting(stage, m):
                    stage([parts[begin + m]])
            statistics.replay(stage, microbatches)

    together(lambda: train(0), lambda: train(1))
    for name, expected in alone.named_buffers():
        one, other = (copy.get_buffer(name) for copy in copies)
        assert one.equal(other)
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
