"""Outputs of micro-batches become those of a batch, and their gradients are split."""

from types import SimpleNamespace
from typing import Any

import torch

from lightning_hybrid.driver.outputs import join_outputs, split_gradients
from lightning_hybrid.graph.rows import Rows


def test_gradients_are_split_as_outputs_are_joined() -> None:
    graph: Any = SimpleNamespace(
        rows={"logits": Rows(0), "by_time": Rows(1), "shared": None},
        tensor_outputs=("logits", "by_time", "shared"),
    )
    parts = [[torch.ones(n, 2) * n, torch.ones(3, n) * n, torch.tensor(1.0)] for n in (2, 1)]
    joined = join_outputs(parts, graph)
    assert [tuple(each.shape) for each in joined] == [(3, 2), (3, 3), ()]
    logits, by_time, shared = zip(*split_gradients(joined, [2, 1], graph))
    for index, given in enumerate((logits, by_time)):
        assert all(torch.equal(one, part[index]) for one, part in zip(given, parts))
    assert [value.item() for value in shared] == [1, 0]  # (it would count once for each)
    assert split_gradients([None, None, None], [2, 1], graph) == [[None] * 3] * 2
