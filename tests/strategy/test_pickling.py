"""A strategy can be pickled after a run: no group, link or thread goes with it."""

import pickle
from datetime import timedelta

import torch.distributed as dist

from lightning_hybrid import HybridGabraStrategy
from lightning_hybrid.runtime.batchnorm import Synchronised


def test_the_group_of_batch_statistics_stays_behind() -> None:
    strategy = HybridGabraStrategy(pipeline_parallel_size=2)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    strategy._statistics = Synchronised(group)
    copy = pickle.loads(pickle.dumps(strategy))
    with copy._statistics:  # it is of no replicas
        pass
