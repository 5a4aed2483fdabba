"""A strategy can be pickled after a run: no group, link or thread goes with it."""

import pickle
from datetime import timedelta

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_hybrid import HybridGabraStrategy


@pytest.mark.parametrize("part", ["_ranks.world", "_session", "_building"])
def test_groups_stay_behind(part: str) -> None:
    strategy = HybridGabraStrategy(pipeline_parallel_size=2)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    *owner, name = part.split(".")
    vars(getattr(strategy, *owner) if owner else strategy)[name] = group
    copy = pickle.loads(pickle.dumps(strategy))
    copy.connect(LightningModule())
    assert copy.lightning_module_state_dict() == {}
    assert copy.broadcast("alone") == "alone"
