"""Agree among all ranks on the numbers of replicas and stages that the user has left open.

:mod:`lightning_hybrid.run.rehearsed_sizes` chooses them on rank 0. This module adds two limits: a
number of replicas that the user's code has been told stays, and there is one replica if
``prepare_data`` has set attributes on one rank alone.
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
    alone: bool,
) -> bool:
    """Choose the numbers of replicas, stages and micro-batches, and join the mesh (collective).

    All ranks call this together. Rank 0 chooses, and the others get its result. The sizes are set
    in ``ranks.config``, and the coordinates of this rank follow from them.

    Args:
        ranks: where this process stands.
        trainer: the Trainer, whose LightningModule is built.
        allowed: function that tells whether the Trainer allows numbers of replicas and of stages.
        alone: whether rank 0 alone has attributes that ``prepare_data`` has set. Then there is one
            replica.

    Returns:
        Whether sizes were chosen. ``False``: none could be, and all devices form one chain.
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
            sizes = choose_on_rank_0(trainer, ranks.config, machine, may_have)
    # by rank 0 alone, since ranks with measurements of their own might choose different sizes
    sizes = world.broadcast(sizes)
    if sizes is not None:
        ranks.config = replace(ranks.config, sizes=sizes)
    ranks.take_coordinates(machine)
    return sizes is not None


def compare_prepared(ranks: StrategyRanks, trainer: Trainer) -> bool:
    """Whether ``prepare_data`` has set attributes on rank 0 that other ranks lack (collective).

    That hook runs on one rank of each host only. The ranks compare the names of the attributes of
    the module and the data module that are not ``None``. Rank 0 prints a line on those that others
    lack. All ranks that run the script call this together, after the ``setup`` hooks.

    Args:
        ranks: where this process stands.
        trainer: the Trainer.
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
