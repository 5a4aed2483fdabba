"""How a batch is split for a graph."""

import pytest
import torch
from driven import Calls, batches, model

from lightning_hybrid.driver.microbatches import Specialization


@pytest.mark.parametrize(("rows", "parts"), [(4, 1), (4, 2), (3, 2), (1, 2)])
def test_a_batch_is_split_as_torch_does_and_nothing_is_lost(rows: int, parts: int) -> None:
    [value] = batches(1)
    specialization = Specialization(0, Calls(model().net).graph(value), parts)
    for batch in (value[:rows], value[:rows] + 1):  # the second time the sizes are known
        slices, numbers = specialization.split([batch])
        assert len(numbers) == len(slices) == min(rows, parts)
        for [part], expected in zip(slices, batch.chunk(parts), strict=True):
            assert torch.equal(part, expected)
