"""What a captured graph takes is named as the user's code names it."""

import torch
from torch import Tensor, nn

from lightning_hybrid.asking.partition_costs import capture_call

SHIFT = torch.ones(4)


class TakesMuch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.inner.mask = torch.ones(4)
        self.kept = {"scales": [torch.ones(4)]}

    def forward(self, x: Tensor, *, given: dict[str, Tensor]) -> Tensor:
        y = self.inner(x) * self.inner.mask * self.kept["scales"][0]
        return y + given["offset"] + SHIFT


def test_inputs_have_the_names_that_the_code_gives_them() -> None:
    x, offset = torch.ones(3, 4), torch.ones(4)
    graph, _ = capture_call(TakesMuch(), (x,), {"given": {"offset": offset}})
    assert {leaf.name for leaf in graph.leaves} == {
        "args[0]",
        "given['offset']",
        "self.inner.mask",
        "self.kept['scales'][0]",
        f"{__name__}.SHIFT",
    }
