"""Errors of TorchDynamo as one line for the user."""

import pytest
import torch
from capturing import graph_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as remat

from lightning_hybrid.capture import NotCaptured


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
