"""What scripts do with the numbers of ranks that Lightning and the environment tell them.

Under stages the script runs once per replica: all of it must come out as under DDP over the
replicas, and with one replica as on one device.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from suite import ONE_OF_THREE, ONE_OF_TWO, TWO_OF_TWO, Row, Run
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

EVERY = (ONE_OF_TWO, ONE_OF_THREE, TWO_OF_TWO)
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


@contextmanager
def launched(processes: int) -> Iterator[None]:
    """Inside, the environment is that of a process which `torchrun` or SLURM has started."""
    rank, before = os.environ.get("LOCAL_RANK", "0"), dict(os.environ)
    for rank_, size, local_rank, local_size in (NAMES, SLURM):
        os.environ |= {rank_: rank, local_rank: rank}
        os.environ |= {size: f"{processes}", local_size: f"{processes}"}
    os.environ["SLURM_JOB_NAME"] = "bash"  # Lightning takes no part in it
    try:
        yield
        mine = {name: os.environ.get(name) for name in (*NAMES, *SLURM) if name != "WORLD_SIZE"}
        expected = {
            name: f"{processes}" if "SIZE" in name or "NT" in name else rank for name in mine
        }
        assert mine == expected  # a launcher, or a second Trainer, needs these
    finally:
        os.environ.clear()
        os.environ |= before


class _Launched(Row):
    shapes = EVERY

    def exercise(self, run: Run) -> Any:
        with launched(run.suite.replicas * run.suite.stages):
            super().exercise(run)


class AsksForRanks(_Launched):
    """Asks for ranks in every way, before the run and in it.

    `trainer.world_size`, `num_devices`, `global_rank`, `is_global_zero`, `RANK`, `WORLD_SIZE`,
    SLURM's variables, ...
    """

    fast = True
    control = False  # `ddp` makes a group of one process

    def ask(self) -> dict[str, Any]:
        trainer, strategy = self.trainer, self.trainer.strategy
        devices = getattr(strategy, "parallel_devices", [strategy.root_device])
        return {
            "trainer": (trainer.world_size, trainer.num_devices, trainer.num_nodes),
            "ids": (trainer.device_ids, devices[trainer.local_rank] == strategy.root_device),
            "ranks": (trainer.global_rank, trainer.local_rank, trainer.node_rank),
            "module": (self.global_rank, self.local_rank, trainer.is_global_zero),
            "strategy": (getattr(strategy, "num_processes", 1), strategy.is_global_zero),
            "group": distributed.is_initialized() and distributed.get_world_size(),
            "environment": [os.environ[name] for name in (*NAMES, *SLURM)],
        }

    def train_dataloader(self) -> DataLoader:
        self.seen.append(self.ask())
        return super().train_dataloader()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.ask())

    def on_fit_start(self) -> None:
        self.seen.append(self.ask())


class AsksTheStrategyForRanks(_Launched):
    """Asks `distributed_sampler_kwargs`, `strategy.cluster_environment` and `rank_zero_only.rank`
    for ranks.
    """

    sampled = True
    control = False  # `ddp` has an environment for one process

    def ask(self) -> list[Any]:
        strategy, found = self.trainer.strategy, [rank_zero_only.rank]
        if self.trainer.world_size > 1:  # one device has neither of these
            theirs = strategy.cluster_environment
            found += [theirs.world_size(), theirs.global_rank(), theirs.local_rank()]
            found += [self.trainer.distributed_sampler_kwargs, strategy.distributed_sampler_kwargs]
        elif isinstance(strategy, ParallelStrategy):
            theirs = strategy.cluster_environment
            assert (theirs.world_size(), theirs.global_rank(), theirs.local_rank()) == (1, 0, 0)
            assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
        return found

    def on_fit_start(self) -> None:
        self.seen.append(self.ask())

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.ask())


class AveragesIfThereIsAGroup(Row):
    """Averages the loss where `torch.distributed.is_initialized()`.

    That is false with one replica. The strategy counts as a `DDPStrategy`.
    """

    shapes = EVERY
    sampled = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        total = loss.detach().clone()
        if isinstance(self.trainer.strategy, DDPStrategy) and distributed.is_initialized():
            distributed.all_reduce(total)
            total /= distributed.get_world_size()
        self.seen.append(total.item())
        return loss


class DividesByDevices(_Launched):
    """Divides the batch size by `strategy.num_processes` in `setup`.

    Lightning's example for ImageNet does so. It scales the rate by `trainer.num_devices`.
    """

    sampled = True

    def setup(self, stage: str) -> None:
        self.batch_size, strategy = 8, self.trainer.strategy
        if isinstance(strategy, ParallelStrategy):
            self.batch_size //= max(1, strategy.num_processes)

    def train_dataloader(self) -> DataLoader:
        mine = range(self.trainer.global_rank, self.samples, self.trainer.world_size)
        return DataLoader(torch.utils.data.Subset(self.dataset(), mine), self.batch_size)

    def configure_optimizers(self) -> Any:
        scale = self.trainer.num_devices * self.trainer.num_nodes
        return torch.optim.SGD(self.parameters(), lr=0.05 * scale)


class _Shards(IterableDataset[Any]):
    """Reads in the loader's worker what `webdataset` reads there."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        rank = int(os.environ["RANK"]) * worker.num_workers + worker.id
        count = int(os.environ["WORLD_SIZE"]) * worker.num_workers
        yield from (self.samples[index] for index in range(rank, len(self.samples), count))


class ShardsByTheEnvironment(_Launched):
    """A loader's processes shard a stream by `RANK` and `WORLD_SIZE`, as `webdataset` does."""

    sampled = True
    options: ClassVar = {"max_steps": -1, "max_epochs": 2}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Shards(self.dataset()), batch_size=2, num_workers=2)

    def on_train_end(self) -> None:
        self.seen.append(self.trainer.global_step)


class ShardsInSetup(Row):
    """A `DistributedSampler` of `trainer.global_rank` in `setup`."""

    shapes = EVERY

    def setup(self, stage: str) -> None:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        self.sampler = DistributedSampler(self.dataset(), world, rank)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset(), batch_size=4, sampler=self.sampler)
