"""All ranks agree on the numbers of replicas and stages that the user has left open.

:mod:`lightning_hybrid.run.rehearsed_sizes` chooses them on rank 0. This module adds two limits:
what the user's code has been told already, and what ``prepare_data`` has set on one rank alone.
"""

from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid._lightning import Trainer, is_overridden, rank_zero_info
from lightning_hybrid.run import choose_on_rank_0
from lightning_hybrid.strategy.ranks import StrategyRanks


def agree_on_sizes(
    ranks: StrategyRanks,
    trainer: Trainer,
    allowed: Callable[[int, int], bool],
    *,
    deferred: bool,
    alone: bool,
) -> bool:
    """Choose sizes, which all ranks do together, and take the coordinates that follow.

    Args:
        ranks: they get the sizes.
        trainer: Lightning's. Its network is built.
        allowed: whether the Trainer allows numbers of replicas and stages.
        deferred: whether weights are made by those who will own them.
        alone: whether rank 0 alone has what ``prepare_data`` has set.

    Returns:
        Whether sizes were chosen; else all devices form one chain.
    """
    world = ranks.joined
    machine = ranks.look_around(world.everyone.world)
    told = ranks.told_replicas
    if told is not None:
        rank_zero_info(
            f"The number of replicas is {told}: {ranks.asked_for} was asked before sizes were "
            "chosen, and what was made of the answer must stay true. Ask in train_dataloader or in "
            "a later hook, or give data_parallel_size."
        )

    def may_have(replicas: int, stages: int) -> bool:
        if told not in (None, replicas) or (alone and replicas > 1):
            return False
        return allowed(replicas, stages)

    sizes = None
    if world.coordinates.rank == 0:
        with world.choosing():
            sizes = choose_on_rank_0(trainer, ranks.config, machine, may_have, deferred=deferred)
    # by rank 0 alone, since ranks with measurements of their own might choose different sizes
    sizes = world.broadcast(sizes)
    if sizes is not None:
        ranks.config = replace(ranks.config, sizes=sizes)
    ranks.take_coordinates(machine)
    return sizes is not None


def compare_prepared(ranks: StrategyRanks, trainer: Trainer) -> bool:
    """Whether rank 0 alone has what ``prepare_data`` has set; drivers of other replicas lack it.

    That hook runs on one rank of each host only. All ranks call this together, after the ``setup``
    hooks.
    """
    is_open = not ranks.joined.has_coordinates
    owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
    prepared = [owner for owner in owners if is_overridden("prepare_data", owner)]
    if not prepared or not (is_open or ranks.replicas > 1):
        return False
    mine = [
        f"{type(owner).__name__}.{name}"
        for owner in prepared
        for name, value in vars(owner).items()
        if value is not None
    ]
    # by names, since values may be large and not comparable
    first, *others = ranks.joined.gather(mine, "the comparison of what prepare_data has set")
    names = sorted(set(first).difference(set(first).intersection(*map(set, others))))
    if names:
        rank_zero_info(
            f"prepare_data has set {', '.join(names)} on rank 0 alone, where it runs (as under "
            f"DDP): the other replicas do not have it{', so there is one' if is_open else ''}. "
            "Set it in setup, which runs on all ranks."
        )
    return bool(names)
