"""Automatic sizes: rank 0 looks at a training step, and all ranks hear what it has chosen.

This is before drivers and workers part, so nothing of it belongs to the run: what a network takes
is measured on a copy (:mod:`lightning_hybrid.run.rehearsal`) and kept in the cache of profiles,
where the run finds it when it cuts the network. Where nothing can be known beforehand all devices
form one chain, in which the network is found at its first call.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_hybrid._lightning import (
    LightningDataModule,
    LightningModule,
    Trainer,
    TrainerFn,
    is_overridden,
    rank_zero_info,
)
from lightning_hybrid.config import Config
from lightning_hybrid.driver import present_bytes
from lightning_hybrid.errors import HybridError
from lightning_hybrid.graph import fits, why_whole
from lightning_hybrid.planning import (
    ASSUMED_TENSORS,
    CalledNetwork,
    Machine,
    PartitionTable,
    Prediction,
    Sizes,
)
from lightning_hybrid.run.progress import StartProgress, display_of
from lightning_hybrid.run.rehearsal import rehearsal
from lightning_hybrid.run.world import World


class SizeChooser:
    """Chooses replicas, stages and micro-batches for one run.

    Args:
        trainer: Lightning's, which is setting up the run.
        config: what the user has asked for.
        machine: the devices of all ranks.
        device: of this rank.
        allowed: whether numbers of replicas and stages may be chosen.
        supposing: inside of it the user's code finds so many replicas.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        machine: Machine,
        device: torch.device,
        allowed: Callable[[int, int], bool],
        supposing: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self._supposing = supposing
        self._trainer, self._config, self._allowed = trainer, config, allowed
        self._machine, self._device = machine, device
        self._progress = StartProgress(display_of(trainer, rank_zero_info))

    def on_all_ranks(self, world: World, *, deferred: bool) -> Sizes | None:
        """What rank 0 has chosen; all ranks call this together.

        Args:
            world: all ranks.
            deferred: whether weights are made by those who will own them.

        Returns:
            ``None``: nothing can be known, so all devices form one chain, as said in one line.
        """
        sizes = None
        if world.coordinates.rank == 0:
            with world.choosing():
                sizes = self._choose_or_say_why(deferred)
        # ranks that chose by their own measurements might not agree
        return world.broadcast(sizes)

    def _choose_or_say_why(self, deferred: bool) -> Sizes | None:
        reason = None
        if self._trainer.state.fn != TrainerFn.FITTING:
            reason = "sizes are chosen for training, and this run does not train"
        elif deferred:
            reason = "a network that is made in configure_model is whole on no rank"
        else:
            try:
                return self._choose()
            except HybridError as error:
                reason = str(error)
            except Exception as error:  # a network may fail to run by itself in any way it likes
                reason = f"its network cannot be measured ({type(error).__name__}: {error})"
            finally:
                gc.collect()  # the copy of the network is in cycles, and as large as the network
        count = len(self._machine.devices)
        rank_zero_info(
            f"All {count} devices form one chain, as with pipeline_parallel_size={count}: {reason}"
        )
        return None

    def _choose(self) -> Sizes:
        config, trainer = self._config, self._trainer
        self._progress.begin("looking at a training step")
        module, precision = trainer.lightning_module, trainer.precision_plugin
        try:
            with rehearsal(
                trainer, module, config.names, self._device, precision, self._supposing
            ) as step:
                looked = step.networks
                choice = Prediction(
                    self._machine,
                    [partial(self._measured, seen) for seen in looked],
                    batch=max(seen.graph.batch_of(seen.leaves) or 1 for seen in looked),
                    divided=step.divided,
                    asked=config.microbatches,
                    splits=_splits(looked),
                    settings=config.settings,
                    present_bytes=present_bytes(module, self._device),
                    by_speed=config.balance == "speed",
                ).choose(self._allowed)
        finally:
            self._progress.over()
        rank_zero_info(choice.describe())
        if config.microbatches is None and (reason := _why_whole(looked)) is not None:
            rank_zero_info(f"num_microbatches='auto' is 1: {reason}.")
        return choice.best.sizes

    def _measured(self, seen: CalledNetwork, microbatches: int) -> PartitionTable:
        """What a network takes with so many micro-batches; from the cache where it is known."""
        graph = seen.graph
        if microbatches > 1 and not graph.is_static:
            seen = replace(seen, leaves=graph.split(list(seen.leaves), microbatches)[0])

        # Lightning makes the optimizers after the sizes are known: their states are assumed
        weights = graph.network.named_parameters()
        state = {n: ASSUMED_TENSORS * p.nbytes for n, p in weights if p.requires_grad}
        divides = self._config.settings.shards_states
        return seen.table(
            self._device, state, self._progress.of_profiling(seen.name), divides_states=divides
        )


def prepared_alone(trainer: Trainer, world: World) -> list[str]:
    """Attributes that ``prepare_data`` has set on rank 0, and not on every other rank.

    It runs on one rank of each host. All ranks call this together.

    Args:
        trainer: Lightning's, after the ``setup`` hooks.
        world: all ranks.
    """
    owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    prepared = [owner for owner in owners if owner is not None and _prepares(owner)]
    if not prepared:
        return []
    names = [
        f"{type(owner).__name__}.{name}"
        for owner in prepared
        for name, value in vars(owner).items()
        if value is not None
    ]
    # names and not values, which may be large and need not be comparable
    first, *others = world.gather(names, "the comparison of what prepare_data has set")
    return sorted(set(first).difference(set(first).intersection(*map(set, others))))


def _prepares(owner: Any) -> bool:
    kind = LightningModule if isinstance(owner, LightningModule) else LightningDataModule
    return is_overridden("prepare_data", owner, kind)


def _why_whole(looked: Sequence[CalledNetwork]) -> str | None:
    """Why batches of several samples go through a network whole; ``None``: they need not."""
    calls = [(s.graph, s.leaves) for s in looked if (s.graph.batch_of(s.leaves) or 1) > 1]
    return next(filter(None, (why_whole(graph, leaves, 2) for graph, leaves in calls)), None)


def _splits(looked: Sequence[CalledNetwork]) -> Callable[[int], bool]:
    """Tells whether batches may go through all networks in so many micro-batches."""
    calls, whole = [(seen.graph, seen.leaves) for seen in looked], _why_whole(looked) is not None
    return lambda microbatches: (
        not whole and all(fits(graph, leaves, microbatches) for graph, leaves in calls)
    )
