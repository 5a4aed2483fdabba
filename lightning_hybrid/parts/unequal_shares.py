"""Replicas that take unequal parts of each global batch (``BySpeed``), and their weights.

Each replica averages its loss over its own samples, and the gradients of R replicas are averaged
with weights 1 / R. So that the sum is that of Eq. 12 of Akintoye et al. 2022, and of one device
that has the whole batch, replica r multiplies its loss with R b_r / B before the backward: b_r of
the B samples of the global batch are its own. Nothing below the loss needs to know.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid._lightning import isolate_rng, rank_zero_info
from lightning_hybrid._lightning_private import rebuilt_loader
from lightning_hybrid._trees import tensors_in
from lightning_hybrid.comm import ANOTHER_REPLICA, start, wait
from lightning_hybrid.errors import PlanError
from lightning_hybrid.parts.replica_times import ReplicaTimes
from lightning_hybrid.planning import batch_sizes, share_samples
from lightning_hybrid.run import Part, Run


class ShareOfBatches:
    """A batch sampler that yields one replica's part of each global batch of an epoch.

    All replicas go through the same order of all samples. Replica r takes its share of each global
    batch, behind the shares of the replicas before it; so every sample is in one batch of one
    replica.

    Args:
        shares: the shares of the replicas.
        loader: the user's data loader, whose ``batch_size`` (times the number of replicas) and
            ``drop_last`` decide on the global batches.
        sampler: gives the order of all samples, which must be the same on all replicas.
    """

    def __init__(
        self, shares: "UnequalShares", loader: Any, sampler: DistributedSampler[Any]
    ) -> None:
        self._shares = shares
        self.sampler = sampler
        self.drop_last: bool = loader.drop_last
        # samples of a full global batch
        self.whole: int = loader.batch_size * len(shares.speeds)
        # a loader with a state of its own leaves out by itself what was trained on
        self._resumes = hasattr(loader, "load_state_dict")

    @property
    def batch_size(self) -> int:
        """Number of samples that this replica has of a full global batch."""
        return len(self._shares.part(self.whole, self._shares.speeds))

    def _sizes(self) -> list[int]:
        count, replicas = len(self.sampler), len(self._shares.speeds)
        return batch_sizes(count, self.whole, replicas, drop_last=self.drop_last)

    def __len__(self) -> int:
        return len(self._sizes())

    def __iter__(self) -> Iterator[list[Any]]:
        # shares of the next epoch may be known before this one has dealt its last batch
        sizes, speeds = self._sizes(), self._shares.speeds
        # workers of a loader begin before the Trainer names the epoch in which a run goes on
        epoch, done = self._shares.position(len(sizes))
        self.sampler.set_epoch(epoch)
        # replicas have drawn other random numbers for other samples, and must agree on an order
        with isolate_rng(include_cuda=False):
            seed = (self.sampler.seed + epoch) % 2**32
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            samples = iter(list(self.sampler))
        for number, size in enumerate(sizes):
            whole = list(islice(samples, size))
            if number >= done or self._resumes:
                yield [whole[place] for place in self._shares.part(size, speeds)]


class UnequalShares(Part):
    """The part of a run that deals samples to the replicas by their speed, and weighs their losses.

    Args:
        run: the run, which is about to begin, with several replicas.

    Attributes:
        speeds: speed of each of the R replicas, relative to the others.

    Raises:
        PlanError: batch statistics are to be taken over the replicas, of which some may have fewer
            micro-batches than others.
    """

    def __init__(self, run: Run) -> None:
        mesh = run.world.mesh
        cluster = run.world.cluster
        plan = run.config.plan
        here = mesh.coordinates
        if run.synchronised and here.ranks_per_replica > 1 and run.config.microbatches != 1:
            raise PlanError(
                "sync_batchnorm=True takes statistics over micro-batches of the same number on all "
                "replicas, and a small share (BySpeed) may have fewer of them. Use "
                "num_microbatches=1, or leave one of the two out."
            )
        self.speeds: Sequence[float] = (1.0,) * here.replicas
        if plan is not None and plan.shares:
            # what a plan deals is in proportion to itself
            self.speeds = tuple(map(float, plan.shares))
        elif cluster is not None:
            self.speeds = cluster.replica_speeds
        trainer = self._trainer = run.trainer
        self._replica = here.dp_rank
        self._drivers = mesh.drivers
        self._survivors = mesh.survivors
        # by which each epoch has other shares
        self._times: ReplicaTimes | None = None
        if run.config.replans_shares:
            self._times = ReplicaTimes(run.device, lambda: trainer.is_last_batch)
        self._batch = 0  # samples of a full batch of all replicas
        self._own = 1.0
        # what all replicas weigh; behind it, of each the seconds for a sample of the batch before
        # float32 would not count the samples of a large batch exactly
        self._sums = torch.ones(1 + len(self.speeds), dtype=torch.float64)
        self._work: dist.Work | None = None

    @property
    def _living(self) -> Sequence[int]:
        """Numbers (``dp_rank``) of the replicas that are left."""
        return self._survivors.living if self._survivors else range(len(self.speeds))

    def part(self, size: int, speeds: Sequence[float]) -> range:
        """Return the places in a global batch whose samples are this replica's.

        Args:
            size: number of samples of the global batch.
            speeds: relative speed of each replica, lost ones included.
        """
        living = self._living
        place = living.index(self._replica)
        ends = list(accumulate(share_samples(size, [speeds[r] for r in living]), initial=0))
        return range(ends[place], ends[place + 1])

    def position(self, batches: int) -> tuple[int, int]:
        """Return the number of the epoch that begins, and how many of its batches are done already.

        Some may be done if the run goes on from a checkpoint.

        Args:
            batches: number of batches of an epoch, before the Trainer's limit.
        """
        loop: Any = self._trainer.fit_loop  # (whose annotations are of narrower classes)
        limit = self._trainer.limit_train_batches
        done = loop.epoch_loop.batch_progress.current.processed if loop.restarting else 0
        count = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        # one that was saved at its last batch is over
        over, done = divmod(done, max(1, count))
        return loop.epoch_progress.current.processed + over, done

    def train_loader(self, loader: Any) -> Any:
        """Return a train loader that gives this replica its share of the samples.

        Args:
            loader: a loader to which Lightning has added a ``DistributedSampler``. Another one is
                returned as it is, and a line says so.

        Raises:
            PlanError: the loader has a batch sampler of its own, or its batches are too small to be
                divided.
        """
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(sampler, DistributedSampler):
            rank_zero_info(
                f"BySpeed leaves the samples of {type(loader).__name__} as they are dealt: "
                "no DistributedSampler of Lightning makes its batches. Gradients are weighted by "
                "the number of samples in each replica's batch."
            )
            return loader
        self._refuse(loader, len(sampler.dataset))  # type: ignore[arg-type]
        # the same order of all samples, by a sampler that is not the user's own object
        sampler = copy(sampler)
        sampler.num_replicas = 1
        sampler.rank = 0
        sampler.num_samples = sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
        batches = ShareOfBatches(self, loader, sampler)
        if self._batch != batches.whole:  # else a loader of another epoch, or one more
            self._batch = batches.whole
            rank_zero_info(f"BySpeed(): {self._shares_in_words()}")
        return rebuilt_loader(loader, batches)

    def _refuse(self, loader: DataLoader[Any], count: int) -> None:
        """Refuse a data loader whose batches cannot be divided by speed.

        Args:
            loader: the user's loader.
            count: number of samples in its data set.

        Raises:
            PlanError: its batches cannot be divided.
        """
        replicas, size = len(self.speeds), loader.batch_size
        if type(loader.batch_sampler) is not BatchSampler or size is None:
            raise PlanError(
                f"BySpeed makes the batches of each replica, and {type(loader).__name__} "
                f"has a batch sampler of its own, {type(loader.batch_sampler).__name__}. Deal the "
                "samples there (Trainer(use_distributed_sampler=False)): gradients are weighted "
                "by what a batch has; or use Equal()."
            )
        if size < 2 or count < replicas:
            raise PlanError(
                f"BySpeed gives {replicas} replicas parts of batch_size({size}) x "
                f"{replicas} samples, of {count} in the data set: there is nothing to divide. "
                f"Give batch_size=2 or more and {replicas} samples or more, or use Equal()."
            )

    def batch_starts(self, batch: Any) -> None:
        """Begin to tell the other replicas what this replica's batch weighs (collective).

        The weight is the number of samples, or what the user's ``hybrid_weight`` returns.

        Args:
            batch: the batch of this replica.

        Raises:
            PlanError: ``training_step`` takes an iterator, so that there is no batch to weigh yet;
                or the tensors of the batch do not tell how many samples it has.
        """
        if isinstance(batch, Iterator):
            raise PlanError(
                "BySpeed weighs each batch before training_step, which takes a "
                "dataloader_iter here. Let it take the batch, or use Equal()."
            )
        self._hear()
        weight = getattr(self._trainer.lightning_module, "hybrid_weight", self._samples)
        before, self._own = self._own, float(weight(batch))
        if self._survivors is not None:
            # It travels with the gradients. Beside the usual part of a batch, so that hooks on
            # gradients see numbers of the usual size before they are averaged.
            usual = self._batch / len(self.speeds)
            self._survivors.weight = self._own / usual if usual else self._own
            return
        self._sums.zero_()
        self._sums[0] = self._own
        if self._times is not None and before:
            self._sums[1 + self._replica] = self._times.batch_arrives() / before
        # it travels beside the forward, and is needed when the loss is known
        self._work = start(self._drivers.allreduce, [self._sums], peer=ANOTHER_REPLICA)

    @contextmanager
    def step(self) -> Iterator[None]:
        yield
        self._hear()

    def _hear(self) -> None:
        """Wait for the weights of the other replicas' batches, if they have not come yet.

        At the last batch of an epoch this may also change the shares for the next one.
        """
        if self._work is None:
            return
        wait(self._work, ANOTHER_REPLICA)
        self._work = None
        if self._times is not None:
            self._times.note(self._sums[1:].tolist())
            if self._times.is_last():
                self._share_anew(self._times.speeds())

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Scale a loss so that gradients, averaged over the replicas, are the global batch's."""
        if self._survivors is not None:
            return loss * self._survivors.weight
        self._hear()
        total = self._sums[0].item()
        factor = len(self.speeds) * self._own / total if total else 0.0
        return loss if factor == 1 else loss * factor

    def backward_is_over(self) -> None:
        if self._times is not None:
            self._times.backward_is_over()

    def _samples(self, batch: Any) -> int:
        """Return the number of samples of a batch, which is the first size of all its tensors.

        Raises:
            PlanError: the tensors have several first sizes, or there is none.
        """
        sizes = sorted({len(tensor) for _, tensor in tensors_in(batch) if tensor.ndim})
        if len(sizes) != 1:
            module = self._trainer.lightning_module
            raise PlanError(
                "BySpeed weighs a batch by the first dimension of its tensors, and those "
                f"of this {type(batch).__name__} have {', '.join(map(str, sizes)) or 'none'}. "
                f"Define hybrid_weight(self, batch) in {type(module).__name__}, which "
                "returns how many samples the batch has, or what else its loss is a mean over."
            )
        return sizes[0]

    def _share_anew(self, speeds: Sequence[float] | None) -> None:
        """Deal the next epoch by other speeds, and tell the user if this changes a share.

        Args:
            speeds: samples per second of each replica in this epoch; ``None``: not known, and
                nothing changes.
        """
        if speeds is None or not self._batch:
            return
        before = share_samples(self._batch, self.speeds)
        self.speeds = speeds
        if share_samples(self._batch, speeds) != before:
            rank_zero_info(f"replan='epoch': from the next epoch on {self._shares_in_words()}")

    def say_who_is_left(self, lost: Collection[int]) -> None:
        """Tell the user which replicas are lost, and which shares the others have from now on.

        Args:
            lost: numbers (``dp_rank``) of the lost replicas.
        """
        rank_zero_info(
            f"on_loss='continue': replica {', '.join(map(str, sorted(lost)))} is lost. From "
            f"now on, without it, {self._shares_in_words()}"
        )

    def _shares_in_words(self) -> str:
        left = [self.speeds[replica] for replica in self._living]
        shares = ", ".join(map(str, share_samples(self._batch, left)))
        speeds = ", ".join(f"{speed / max(left):.2g}" for speed in left)
        return (
            f"the replicas take {shares} of each {self._batch} samples (relative speeds {speeds})."
        )
