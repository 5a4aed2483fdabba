"""Networks that are whole on no rank: what is refused."""

import pytest
import torch
from torch import nn

from lightning_hybrid.errors import DeferredError
from lightning_hybrid.remote.deferral import Deferral
from lightning_hybrid.stage.staged_network import tensors_of
from lightning_hybrid.state.deferred_weights import refuse_tied


def test_stages_cannot_share_a_weight_that_one_rank_makes() -> None:
    module, made_before = nn.Module(), nn.Linear(3, 3)
    with Deferral(torch.device("cpu")).building(module):
        module.net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), made_before)
        module.net[1].weight = module.net[0].weight
    tensors = tensors_of(module)
    refuse_tied("net", tensors, [frozenset(), frozenset({"2.weight"})])
    with pytest.raises(DeferredError, match=r"device 1 .*'net\.0\.weight'.*__init__"):
        refuse_tied("net", tensors, [frozenset(), frozenset({"0.weight", "2.weight"})])
