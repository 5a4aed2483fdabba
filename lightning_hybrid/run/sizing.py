"""Automatic sizes: rank 0 rehearses a training step, chooses sizes and broadcasts them.

This happens before the run, while no rank is a driver or worker yet: networks are profiled on a
copy (:mod:`lightning_hybrid.run.rehearsal`). The profiles are kept in their cache, where the run
finds them when it cuts the network. If no sizes can be chosen beforehand, all devices form one
chain, and the network is found at its first call.
"""

import gc
from collections.abc import Callable, Sequence
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
from lightning_hybrid.run.progress import StartProgress
from lightning_hybrid.run.rehearsal import rehearsal
from lightning_hybrid.run.world import World


class SizeChooser:
    """Chooses numbers of replicas, stages and micro-batches for one run.

    Args:
        trainer: the Trainer, which is setting up the run.
        config: options of the user.
        machine: the devices of all ranks.
        device: device of this rank.
        allowed: function that tells whether numbers of replicas and stages may be chosen.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        machine: Machine,
        device: torch.device,
        allowed: Callable[[int, int], bool],
    ) -> None:
        self._trainer, self._config, self._allowed = trainer, config, allowed
        self._machine, self._device = machine, device
        self._progress = StartProgress.beside(trainer)

    def on_all_ranks(self, world: World, *, deferred: bool) -> Sizes | None:
        """Choose sizes on rank 0; all ranks call this together and get them.

        Args:
            world: the ranks of the run.
            deferred: whether the network is made in ``configure_model``, each weight by its owner.

        Returns:
            The sizes. ``None``: none can be chosen, so all devices form one chain; a line says why.
        """
        sizes = None
        if world.coordinates.rank == 0:
            with world.choosing():
                sizes = self._choose_or_say_why(deferred)
        # by rank 0 alone, since ranks with measurements of their own might choose different sizes
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
            except Exception as error:  # a network may raise anything when it runs by itself
                reason = f"its network cannot be measured ({type(error).__name__}: {error})"
            finally:
                gc.collect()  # frees the copy of the network, which is in reference cycles
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
            with rehearsal(trainer, module, config.names, self._device, precision) as looked:
                choice = Prediction(
                    self._machine,
                    [partial(self._measured, seen) for seen in looked],
                    batch=max(seen.graph.batch_of(seen.leaves) or 1 for seen in looked),
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
        """The table of a network for a number of micro-batches, measured or from the cache."""
        graph = seen.graph
        if microbatches > 1 and not graph.is_static:
            seen = replace(seen, leaves=graph.split(list(seen.leaves), microbatches)[0])

        # the optimizers are made after the sizes are chosen: the size of their state is assumed
        weights = graph.network.named_parameters()
        state = {n: ASSUMED_TENSORS * p.nbytes for n, p in weights if p.requires_grad}
        divides = self._config.settings.shards_states
        return seen.table(
            self._device, state, self._progress.of_profiling(seen.name), divides_states=divides
        )


def prepared_alone(trainer: Trainer, world: World) -> list[str]:
    """Names of attributes that ``prepare_data`` has set on rank 0, and not on all other ranks.

    That hook runs on one rank of each host only. All ranks call this together.

    Args:
        trainer: the Trainer, after the ``setup`` hooks.
        world: the ranks of the run.
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
    # by names, since values may be large and not comparable
    first, *others = world.gather(names, "the comparison of what prepare_data has set")
    return sorted(set(first).difference(set(first).intersection(*map(set, others))))


def _prepares(owner: Any) -> bool:
    kind = LightningModule if isinstance(owner, LightningModule) else LightningDataModule
    return is_overridden("prepare_data", owner, kind)


def _why_whole(looked: Sequence[CalledNetwork]) -> str | None:
    """The reason why batches of a network cannot be split; ``None``: they can, for all networks."""
    calls = [(s.graph, s.leaves) for s in looked if (s.graph.batch_of(s.leaves) or 1) > 1]
    return next(filter(None, (why_whole(graph, leaves, 2) for graph, leaves in calls)), None)


def _splits(looked: Sequence[CalledNetwork]) -> Callable[[int], bool]:
    """Make a function that tells whether all networks allow a number of micro-batches."""
    calls, whole = [(seen.graph, seen.leaves) for seen in looked], _why_whole(looked) is not None
    return lambda microbatches: (
        not whole and all(fits(graph, leaves, microbatches) for graph, leaves in calls)
    )
