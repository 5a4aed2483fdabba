"""Choose the numbers of replicas, stages and micro-batches on rank 0, by a rehearsed training step.

This happens before the run, while no rank is a driver or worker yet: networks are profiled on a
copy (:mod:`lightning_hybrid.run.rehearsal`). The profiles are kept in their cache, where the run
finds them when it cuts the network. If no sizes can be chosen beforehand, all devices form one
chain, and the network is found at its first call.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_hybrid._lightning import Trainer, TrainerFn, is_overridden, rank_zero_info
from lightning_hybrid.config import Config
from lightning_hybrid.driver import present_bytes
from lightning_hybrid.errors import HybridError
from lightning_hybrid.graph import why_whole
from lightning_hybrid.planning import Machine, PartitionTable, ShapeRequest, Sizes, fastest_sizes
from lightning_hybrid.profiling import ASSUMED_TENSORS, CalledNetwork, states_of_partitions
from lightning_hybrid.run.building import averages_weights
from lightning_hybrid.run.rehearsal import rehearsal
from lightning_hybrid.run.run import progress_beside


def choose_on_rank_0(
    trainer: Trainer,
    config: Config,
    machine: Machine,
    allowed: Callable[[int, int], bool],
) -> Sizes | None:
    """On rank 0, choose the numbers of replicas, stages and micro-batches for a run.

    Runs and measures a copy of the module, so it may take a while; a line says what was chosen.

    Args:
        trainer: the Trainer, which is setting up the run.
        config: options of the user.
        machine: the devices of all ranks, from a survey.
        allowed: function that tells whether a number of replicas and one of stages may be chosen.

    Returns:
        The sizes. ``None``: none can be chosen, so all devices form one chain; a line says why.
    """
    try:
        return _choose(trainer, config, machine, allowed)
    except HybridError as error:
        reason = str(error)
    except Exception as error:  # a network may raise anything when it runs by itself
        reason = f"its network cannot be measured ({type(error).__name__}: {error})"
    finally:
        gc.collect()  # frees the copy of the network, which is in reference cycles
    say_chain(len(machine.devices), reason)
    return None


def why_chain(trainer: Trainer) -> str | None:
    """Say why all devices form one chain in a run of open sizes, if its kind tells.

    Then no rank has to begin the script only to become a server. The answer is the same on all
    ranks. ``None``: sizes are chosen by a rehearsed step (:func:`choose_on_rank_0`).

    Args:
        trainer: the Trainer, which begins a run.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return "sizes are chosen for training, and this run does not train"
    made = is_overridden("configure_model", trainer.lightning_module)
    if made and not averages_weights(trainer):
        return "a network that is made in configure_model is whole on no rank"
    return None


def say_chain(devices: int, reason: str) -> None:
    """Print, on rank 0, that all devices form one chain.

    Args:
        devices: their number.
        reason: why.
    """
    rank_zero_info(
        f"All {devices} devices form one chain, as with pipeline_parallel_size={devices}: {reason}"
    )


def _choose(
    trainer: Trainer, config: Config, machine: Machine, allowed: Callable[[int, int], bool]
) -> Sizes:
    progress, device = progress_beside(trainer), trainer.strategy.root_device
    module, precision = trainer.lightning_module, trainer.precision_plugin

    def measured(seen: CalledNetwork, microbatches: int) -> PartitionTable:
        """Return the costs of a network's partitions for a micro-batch, measured or from the cache.

        Args:
            seen: a call of the network with a whole batch.
            microbatches: into how many micro-batches the batch is split.
        """
        graph = seen.graph
        if microbatches > 1 and not graph.is_static:
            seen = replace(seen, leaves=graph.split(list(seen.leaves), microbatches)[0])
        # the optimizers are made after the sizes are chosen: the size of their state is assumed
        weights = graph.network.named_parameters()
        state = {n: ASSUMED_TENSORS * p.nbytes for n, p in weights if p.requires_grad}
        progress.doing(f"profiling {seen.name or 'self'!r}")
        table = seen.profile(device)
        states = states_of_partitions(seen.partitions, state)
        return table.with_optimizer(states, divides=config.settings.shards_states)

    progress.begin("looking at a training step")
    try:
        with rehearsal(
            trainer, module, config.names, device, precision, shares=config.may_run_inside
        ) as looked:
            asked = ShapeRequest(
                settings=config.settings,
                inside=tuple(not seen.graph.no_shares for seen in looked),
                microbatches=config.microbatches,
                splits=lambda count: _why_whole(looked, count) is None,
                allowed=allowed,
                by_speed=config.by_speed,
            )
            choice = fastest_sizes(
                machine,
                [partial(measured, seen) for seen in looked],
                max(seen.graph.batch_of(seen.leaves) or 1 for seen in looked),
                asked,
                present_bytes(module, device),
            )
    finally:
        progress.over()
    rank_zero_info(choice.describe())
    if config.microbatches is None and (reason := _why_whole(looked, 2)) is not None:
        rank_zero_info(f"num_microbatches='auto' is 1: {reason}.")
    return choice.best.sizes


def _why_whole(looked: Sequence[CalledNetwork], microbatches: int) -> str | None:
    """Say why the batches of some network cannot be split; ``None``: all can be split.

    Args:
        looked: calls of the networks, each with a whole batch.
        microbatches: into how many micro-batches.
    """
    calls = [(s.graph, s.leaves) for s in looked if s.graph.batch_of(s.leaves) != 1]
    return next(filter(None, (why_whole(*call, microbatches) for call in calls)), None)
