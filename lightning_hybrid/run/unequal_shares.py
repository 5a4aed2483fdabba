"""Replicas that take unequal parts of each global batch (``balance="speed"``), and their weights.

Each replica averages its loss over its own samples, and the gradients of R replicas are averaged
with weights 1 / R. So that the sum is that of Eq. 12 of Akintoye et al. 2022, and of one device
that has the whole batch, replica r multiplies its loss with R b_r / B before the backward: b_r of
the B samples of the global batch are its own. Nothing below the loss needs to know.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid._lightning import (
    LightningModule,
    Trainer,
    extract_batch_size,
    rank_zero_info,
)
from lightning_hybrid._lightning_private import rebuilt_loader
from lightning_hybrid.comm import ANOTHER_REPLICA, Group, start, wait
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import batch_sizes, deal, without_the_slowest
from lightning_hybrid.run.run import Run

WORTHWHILE = 1.05
"""Gain from which on it is said that replicas without the slowest would be faster."""
Position = Callable[[int], tuple[int, int]]


class DealtBatches:
    """The parts that one replica has of the global batches of an epoch (a batch sampler).

    All replicas go through the same order of all samples. Replica r takes its share of each global
    batch, behind those of the replicas before it; every sample is in one batch of one replica.

    Args:
        sampler: gives the order of all samples, the same on all replicas.
        batch: size of a global batch.
        speeds: (R,) of the replicas.
        replica: number of this one.
        drop_last: whether samples that do not fill a global batch are left out.
        position: given the number of batches of an epoch, which epoch begins, and how many of its
            batches were trained on before a restart.

    Attributes:
        batch_size: samples of this replica in a full batch.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        batch: int,
        speeds: Sequence[float],
        replica: int,
        *,
        drop_last: bool,
        position: Position,
    ) -> None:
        self.sampler, self.drop_last = sampler, drop_last
        self._batch, self._speeds, self._replica = batch, speeds, replica
        self._position = position
        self.batch_size = deal(batch, speeds)[replica]

    def _sizes(self) -> list[int]:
        count = len(self.sampler)
        return batch_sizes(count, self._batch, len(self._speeds), drop_last=self.drop_last)

    def __len__(self) -> int:
        return len(self._sizes())

    def __iter__(self) -> Iterator[list[Any]]:
        sizes = self._sizes()
        # workers of a loader begin before the Trainer names the epoch in which a run goes on
        epoch, done = self._position(len(sizes))
        self.sampler.set_epoch(epoch)
        samples = iter(self.sampler)
        for number, size in enumerate(sizes):
            whole = list(islice(samples, size))
            if number >= done:
                ends = list(accumulate(deal(size, self._speeds), initial=0))
                yield whole[ends[self._replica] : ends[self._replica + 1]]


class UnequalShares:
    """Deals samples to the replicas by their speed, and weighs what they find.

    Args:
        module: the user's, which may say what a batch weighs, in ``hybrid_weight(batch)``.
        speeds: (R,) of the replicas, relative to each other.
        replica: number of this one.
        drivers: their group, of gloo.
        position: see :class:`DealtBatches`.
        say: prints a line, once for all replicas.
    """

    def __init__(
        self,
        module: LightningModule,
        speeds: Sequence[float],
        replica: int,
        drivers: Group,
        position: Position,
        say: Callable[[str], None],
    ) -> None:
        self._module, self._speeds, self._replica = module, speeds, replica
        self._drivers, self._position, self._say = drivers, position, say
        self._own, self._sum = 1.0, torch.ones(1, dtype=torch.float64)
        self._work: dist.Work | None = None

    @classmethod
    def of(cls, run: Run) -> "UnequalShares | None":
        """Those of a run; ``None``: it has one replica.

        Raises:
            PlanError: batch statistics are taken over replicas whose micro-batches may not meet.
        """
        mesh, cluster, plan = run.world.mesh, run.world.cluster, run.config.plan
        replicas, stages = mesh.coordinates.replicas, mesh.coordinates.ranks_per_replica
        if replicas == 1:
            return None
        speeds = cluster.replica_speeds if cluster else (1.0,) * replicas
        if plan is not None and plan.shares:
            speeds = tuple(map(float, plan.shares))
        if run.synchronised and stages > 1 and run.config.microbatches != 1:
            raise PlanError(
                "sync_batchnorm=True takes statistics over micro-batches of the same number on all "
                "replicas, and a small share (balance='speed') may have fewer of them. Use "
                "num_microbatches=1, or leave one of the two out."
            )
        return cls(
            run.module,
            speeds,
            mesh.coordinates.dp_rank,
            mesh.drivers,
            partial(_position, run.trainer),
            rank_zero_info,
        )

    def deal(self, loader: Any) -> Any:
        """A train loader that gives this replica its share of the samples.

        Args:
            loader: that Lightning has given a ``DistributedSampler``.

        Raises:
            PlanError: the loader makes batches in a way of its own, or too small ones.
        """
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
            self._say(
                f"balance='speed' leaves the samples of {type(loader).__name__} as they are dealt: "
                "Lightning gives it no DistributedSampler. Gradients are weighted by the number of "
                "samples in each replica's batch."
            )
            return loader
        replicas, size = len(self._speeds), loader.batch_size
        if type(loader.batch_sampler) is not BatchSampler or size is None:
            raise PlanError(
                f"balance='speed' makes the batches of each replica, and {type(loader).__name__} "
                f"has a batch sampler of its own, {type(loader.batch_sampler).__name__}. Deal the "
                "samples there (Trainer(use_distributed_sampler=False)): gradients are weighted "
                "by what a batch has; or leave balance out."
            )
        count = len(sampler.dataset)  # type: ignore[arg-type]
        if size < 2 or count < replicas:
            raise PlanError(
                f"balance='speed' gives {replicas} replicas parts of batch_size({size}) x "
                f"{replicas} samples, of {count} in the data set: there is nothing to divide. "
                "Give batch_size=2 or more, or leave balance out."
            )
        # a loader with a state of its own leaves out by itself what was trained on
        resumes = hasattr(loader, "load_state_dict")
        # the same order of samples, and all of them
        sampler.num_replicas, sampler.rank = 1, 0
        sampler.num_samples = sampler.total_size = count
        batches = DealtBatches(
            sampler,
            size * replicas,
            self._speeds,
            self._replica,
            drop_last=loader.drop_last,
            position=(lambda count: (self._position(count)[0], 0)) if resumes else self._position,
        )
        shares = ", ".join(map(str, deal(size * replicas, self._speeds)))
        speeds = ", ".join(f"{speed / max(self._speeds):.2g}" for speed in self._speeds)
        self._say(
            f"balance='speed': the replicas take {shares} of each {size * replicas} samples "
            f"(relative speeds {speeds})."
        )
        fastest, gain = without_the_slowest(size, self._speeds)
        if gain > WORTHWHILE:
            self._say(
                f"The {fastest} fastest of the {replicas} replicas alone would take {gain:.2f} "
                "times as many samples a second: one sample is too much for the others. Leave "
                "their devices out of Trainer(devices=...), or give a larger batch_size."
            )
        return rebuilt_loader(loader, batches)

    def weigh(self, batch: Any) -> None:
        """A batch is about to be trained on: tell the other replicas what it weighs.

        Args:
            batch: of this replica.

        Raises:
            PlanError: ``training_step`` takes an iterator, whose batches nobody has seen.
        """
        if isinstance(batch, Iterator):
            raise PlanError(
                "balance='speed' weighs each batch before training_step, which takes a "
                "dataloader_iter here. Let it take the batch, or leave balance out."
            )
        self._await_sum()
        weight = getattr(self._module, "hybrid_weight", extract_batch_size)
        self._own = float(weight(batch))
        self._sum = torch.tensor([self._own], dtype=torch.float64)
        self._work = start(self._drivers.allreduce, [self._sum], peer=ANOTHER_REPLICA)

    def weighted(self, loss: Tensor) -> Tensor:
        """A loss whose gradients, averaged over the replicas, are those of the global batch."""
        self._await_sum()
        total = self._sum.item()
        factor = len(self._speeds) * self._own / total if total else 0.0
        return loss if factor == 1 else loss * factor

    def _await_sum(self) -> None:
        if self._work is not None:
            wait(self._work, ANOTHER_REPLICA)
            self._work = None


def _position(trainer: Trainer, batches: int) -> tuple[int, int]:
    """Which epoch begins, and how many of its batches were trained on before a restart."""
    loop: Any = trainer.fit_loop  # (whose annotations are of narrower classes)
    limit = trainer.limit_train_batches
    done = loop.epoch_loop.batch_progress.current.processed if loop.restarting else 0
    count = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    # one that was saved at its last batch is over
    over, done = divmod(done, max(1, count))
    return loop.epoch_progress.current.processed + over, done
