"""Loaders that are dealt to replicas by their speed stay the user's in all else."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_hybrid import BySpeed
from lightning_hybrid.comm import Coordinates
from lightning_hybrid.config import Config
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts import unequal_shares
from lightning_hybrid.parts.unequal_shares import UnequalShares

SPEEDS = (1.0, 0.43, 0.16)


def shares(
    replica: int, epoch: int = 0, survivors: Any = None, speeds: tuple[float, ...] = SPEEDS
) -> UnequalShares:
    """Those of one of three replicas, which talks to nobody."""
    trainer = Trainer(logger=False, enable_checkpointing=False)
    trainer.strategy.connect(BoringModel())
    trainer.fit_loop.epoch_progress.current.processed = epoch
    trainer.limit_train_batches = 1.0
    mesh = SimpleNamespace(
        coordinates=Coordinates(replica, 3, 1), drivers=None, survivors=survivors
    )
    run: Any = SimpleNamespace(
        config=Config(replicas=BySpeed()),
        world=SimpleNamespace(mesh=mesh, cluster=SimpleNamespace(replica_speeds=speeds)),
        trainer=trainer,
        synchronised=False,
    )
    return UnequalShares(run)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    lines: list[str] = []
    monkeypatch.setattr(unequal_shares, "rank_zero_info", lines.append)
    return lines


def loader(samples: int = 50, kind: Any = DataLoader, **more: Any) -> Any:
    """As Lightning hands it over under three replicas."""
    data = TensorDataset(torch.arange(samples))
    return kind(data, sampler=DistributedSampler(data, 3, 1, seed=7), **{"batch_size": 4, **more})


def numbers(dealt: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in dealt]


def test_the_share_of_a_lost_replica_is_the_others_from_then_on() -> None:
    left: Any = SimpleNamespace(living=(0, 1, 2))
    everyone = [shares(replica, survivors=left) for replica in range(3)]
    undisturbed = [numbers(shares(replica).train_loader(loader())) for replica in range(3)]
    batches = []
    for parts in zip(*(each.train_loader(loader()) for each in everyone), strict=True):
        batches.append([part[0].tolist() for part in parts])
        if len(batches) == 2:
            left.living = (0, 2)
            break
    dealt = [iter(everyone[replica].train_loader(loader())) for replica in left.living]
    for number, whole in enumerate(zip(*undisturbed, strict=True)):
        now = [next(each)[0].tolist() for each in dealt]
        assert list(chain(*now)) == list(chain(*whole))
        assert number > 1 or batches[number] == list(whole)
        assert min(map(len, now)) > 0


def test_the_loss_of_a_usual_part_keeps_its_size_where_the_sum_comes_with_the_gradients() -> None:
    left: Any = SimpleNamespace(living=(0, 1, 2), weight=None)
    mine = shares(0, survivors=left, speeds=(1.0, 1.0, 1.0))
    mine.train_loader(loader())
    for samples, weight in ((4, 1.0), (6, 1.5)):
        mine.batch_starts([torch.zeros(samples)])
        assert left.weight == weight
        assert mine.weigh_loss(torch.tensor(2.0)).item() == 2 * weight


class Loader(DataLoader):
    """A class of the user's, with an argument of its own."""

    def __init__(self, dataset: Any, *, doubles: bool = False, **more: Any) -> None:
        super().__init__(dataset, **more)
        self.doubles = doubles


def test_replicas_share_each_batch_in_the_order_of_one_sampler() -> None:
    parts = [numbers(shares(replica, epoch=3).train_loader(loader())) for replica in range(3)]
    whole = DistributedSampler(TensorDataset(torch.arange(50)), 1, 0, seed=7)
    whole.set_epoch(3)
    together = [list(chain(*batches)) for batches in zip(*parts, strict=True)]
    assert list(chain(*together)) == list(whole)
    assert [len(batch) for batch in together] == [12, 12, 12, 11, 3]  # and not 2 at the end
    assert [len(part[0]) for part in parts] == [8, 3, 1]


def test_the_loader_is_of_the_same_class_with_the_same_arguments(said: list[str]) -> None:
    def collate(samples: list[Any]) -> Tensor:
        return torch.stack([x for (x,) in samples])

    before = loader(kind=Loader, doubles=True, collate_fn=collate, drop_last=True)
    speaker = shares(1)
    dealt = speaker.train_loader(before)
    speaker.train_loader(loader())  # of the next epoch: nothing new is said
    assert type(dealt) is Loader
    assert dealt.doubles
    assert dealt.collate_fn is collate
    assert dealt.dataset is before.dataset
    assert [len(batch) for batch in dealt] == [3] * (50 // 12)
    assert said == [
        "BySpeed(): the replicas take 8, 3, 1 of each 12 samples (relative speeds 1, 0.43, 0.16)."
    ]


def test_batch_samplers_of_other_classes_and_batches_of_one_sample_are_refused() -> None:
    class Own(BatchSampler):
        pass

    data = TensorDataset(torch.arange(50))
    own = DataLoader(data, batch_sampler=Own(DistributedSampler(data, 3, 1), 4, drop_last=False))
    with pytest.raises(PlanError, match="DataLoader has a batch sampler of its own, Own"):
        shares(0).train_loader(own)
    with pytest.raises(PlanError, match=r"batch_size\(1\) x 3 samples, of 50 in the data set"):
        shares(0).train_loader(loader(batch_size=1))
    with pytest.raises(PlanError, match="which takes a dataloader_iter here"):
        shares(0).batch_starts(iter([torch.ones(2)]))


def test_loaders_that_lightning_does_not_deal_stay_as_they_are(said: list[str]) -> None:
    data = TensorDataset(torch.arange(50))
    for alone in (DataLoader(data, batch_size=4), [torch.ones(2)]):
        assert shares(0).train_loader(alone) is alone
    assert [line[line.index("leaves") : line.index(" they")] for line in said] == [
        "leaves the samples of DataLoader as",
        "leaves the samples of list as",
    ]


def test_replicas_that_have_drawn_other_numbers_share_the_order_of_a_sampler_that_draws() -> None:
    data = TensorDataset(torch.arange(50))
    found: list[int] = []
    for replica in range(3):
        torch.manual_seed(replica)
        random = WeightedRandomSampler([1.0] * 50, 50, replacement=False)
        wrapped = DistributedSamplerWrapper(random, 3, replica, seed=7, shuffle=False)
        dealt = shares(replica, epoch=1).train_loader(DataLoader(data, 4, sampler=wrapped))
        with isolate_rng(include_cuda=False):
            following = torch.rand(3)
        found += chain(*dealt.batch_sampler)
        assert torch.equal(torch.rand(3), following)
    assert sorted(found) == [*range(50)]
    assert found != sorted(found)


@pytest.mark.parametrize(
    ("batch", "has"),
    [
        (["a text", "another"], "list have none"),
        ([torch.ones(3, 8, 8), torch.ones(5, 4)], "list have 3, 5"),
        ({"a": torch.ones(4, 2), "b": torch.ones(6, 2)}, "dict have 4, 6"),
    ],
)
def test_a_batch_whose_samples_cannot_be_counted_is_refused(batch: Any, has: str) -> None:
    with pytest.raises(PlanError, match=rf"of this {has}\. Define hybrid_weight.*BoringModel"):
        shares(0).batch_starts(batch)


def test_a_loader_that_a_hook_has_made_with_a_distributed_sampler_stays_as_it_is() -> None:
    data = TensorDataset(torch.arange(50))
    sampler = DistributedSampler(data, 3, 1)
    with _replace_dunder_methods(DataLoader, "dataset"):  # as Lightning calls hooks
        made = DataLoader(data, 4, sampler=sampler, drop_last=True)
    for _ in range(2):  # as with reload_dataloaders_every_n_epochs
        assert [len(batch) for batch in numbers(shares(1).train_loader(made))] == [3] * (50 // 12)
    assert (sampler.num_replicas, sampler.rank) == (3, 1)
    assert len(made) == 4
