"""Loaders that are dealt to replicas by their speed stay the user's in all else."""

from itertools import chain
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid.errors import PlanError
from lightning_hybrid.run.unequal_shares import UnequalShares

SPEEDS = (1.0, 0.43, 0.16)


def shares(replica: int, said: list[str] | None = None, epoch: int = 0) -> UnequalShares:
    """Those of one of three replicas, which talks to nobody."""
    say = (lambda line: None) if said is None else said.append
    return UnequalShares(BoringModel(), SPEEDS, replica, None, lambda count: (epoch, 0), say)


def loader(samples: int = 50, kind: Any = DataLoader, **more: Any) -> Any:
    """As Lightning hands it over under three replicas."""
    data = TensorDataset(torch.arange(samples))
    return kind(data, sampler=DistributedSampler(data, 3, 1, seed=7), **{"batch_size": 4, **more})


def numbers(dealt: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in dealt]


class Loader(DataLoader):
    """A class of the user's, with an argument of its own."""

    def __init__(self, dataset: Any, *, doubles: bool = False, **more: Any) -> None:
        super().__init__(dataset, **more)
        self.doubles = doubles


def test_replicas_share_each_batch_in_the_order_of_one_sampler() -> None:
    parts = [numbers(shares(replica, epoch=3).deal(loader())) for replica in range(3)]
    whole = DistributedSampler(TensorDataset(torch.arange(50)), 1, 0, seed=7)
    whole.set_epoch(3)
    together = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    assert list(chain(*together)) == list(whole)
    assert [len(batch) for batch in together] == [12, 12, 12, 11, 3]  # and not 2 at the end
    assert [len(part[0]) for part in parts] == [8, 3, 1]


def test_the_loader_is_of_the_same_class_with_the_same_arguments() -> None:
    def collate(samples: list[Any]) -> Tensor:
        return torch.stack([x for (x,) in samples])

    said: list[str] = []
    before = loader(kind=Loader, doubles=True, collate_fn=collate, drop_last=True)
    dealt = shares(1, said).deal(before)
    assert type(dealt) is Loader
    assert dealt.doubles
    assert dealt.collate_fn is collate
    assert dealt.dataset is before.dataset
    assert [len(batch) for batch in dealt] == [3] * (50 // 12)
    assert said == [
        "balance='speed': the replicas take 8, 3, 1 of each 12 samples (relative speeds 1, 0.43, "
        "0.16)."
    ]


def test_batch_samplers_of_other_classes_and_batches_of_one_sample_are_refused() -> None:
    class Own(BatchSampler):
        pass

    data = TensorDataset(torch.arange(50))
    own = DataLoader(data, batch_sampler=Own(DistributedSampler(data, 3, 1), 4, drop_last=False))
    with pytest.raises(PlanError, match="DataLoader has a batch sampler of its own, Own"):
        shares(0).deal(own)
    with pytest.raises(PlanError, match=r"batch_size\(1\) x 3 samples, of 50 in the data set"):
        shares(0).deal(loader(batch_size=1))
    with pytest.raises(PlanError, match="which takes a dataloader_iter here"):
        shares(0).weigh(iter([torch.ones(2)]))


def test_loaders_that_lightning_does_not_deal_stay_as_they_are() -> None:
    data = TensorDataset(torch.arange(50))
    said: list[str] = []
    for alone in (DataLoader(data, batch_size=4), [torch.ones(2)]):
        assert shares(0, said).deal(alone) is alone
    assert [line[line.index("leaves") : line.index(" they")] for line in said] == [
        "leaves the samples of DataLoader as",
        "leaves the samples of list as",
    ]
