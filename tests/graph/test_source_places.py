"""What a captured graph takes is named as the user's code names it."""

import pytest
import torch
from capturing import graph_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as remat

from lightning_hybrid.asking.partition_costs import capture_call
from lightning_hybrid.capture import NotCaptured

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


@pytest.mark.parametrize("checkpointed", [True, False])
def test_code_is_said_to_be_checkpointed_only_if_it_is(checkpointed: bool) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.checkpoint_above = nn.Linear(4, 4), 3.0

        def block(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > self.checkpoint_above else x

        def forward(self, x: Tensor) -> Tensor:
            return remat(self.block, x, use_reentrant=False) if checkpointed else self.block(x)

    with pytest.raises(NotCaptured) as error:
        graph_of(Branches(), torch.ones(3, 4))
    assert ("in an activation checkpoint" in error.value.reason) is checkpointed
