"""Agree among all ranks on the numbers of replicas and stages that the user has left open.

:mod:`lightning_hybrid.run.rehearsed_sizes` chooses them on rank 0. This module adds two limits: a
number of replicas that the user's code has been told stays, and there is one replica if
``prepare_data`` has set attributes on one rank alone.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from subprocess import Popen
from typing import Any

from lightning_hybrid._lightning import Trainer, is_overridden, rank_zero_info
from lightning_hybrid.process import Phase
from lightning_hybrid.run import choose_on_rank_0
from lightning_hybrid.strategy.ranks import StrategyRanks, given


def agree_on_sizes(
    ranks: StrategyRanks,
    trainer: Trainer,
    allowed: Callable[[int, int], bool],
    start_drivers: Callable[[Collection[int]], list[Popen[bytes]]],
    *,
    alone: bool,
) -> bool:
    """Choose the numbers of replicas, stages and micro-batches, and join the mesh (collective).

    All ranks that run the script call this together, but for drivers that are started late. Rank 0
    chooses, and the others get its result. The sizes are set in ``ranks.config``, and the
    coordinates of this rank follow from them.

    Args:
        ranks: where this process stands.
        trainer: the Trainer, whose LightningModule is built.
        allowed: function that tells whether the Trainer allows numbers of replicas and of stages.
        start_drivers: starts the script for drivers; see :meth:`StrategyRanks.meet_as_chosen`.
        alone: whether rank 0 alone has attributes that ``prepare_data`` has set. Then there is one
            replica.

    Returns:
        Whether sizes were chosen. ``False``: none could be, and all devices form one chain.
    """
    world = ranks.joined
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
            machine = given(ranks.machine, "machine")
            sizes = choose_on_rank_0(trainer, ranks.config, machine, may_have)
    lone = world.phase is Phase.LONE
    if not lone:
        # by rank 0 alone, since ranks with measurements of their own might choose different sizes
        sizes = world.broadcast(sizes)
    if sizes is not None:
        ranks.config = replace(ranks.config, sizes=sizes)
    elif lone:
        ranks.config = replace(ranks.config, data_parallel_size=1)
    if lone:
        ranks.meet_as_chosen(start_drivers)
    else:
        ranks.take_coordinates()
    return sizes is not None


class Prepared:
    """Attributes that ``prepare_data`` has set, on one rank of each host, where it runs.

    Those of the module and the data module count that were not there before, or ``None``.

    Args:
        trainer: the Trainer, before the hook is called.
    """

    def __init__(self, trainer: Trainer) -> None:
        owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
        self._owners = [owner for owner in owners if is_overridden("prepare_data", owner)]
        self._before = self._values()
        self._set: dict[str, Any] = {}

    def note(self) -> None:
        """Note what the hook has set; called right after it."""
        self._set = {n: v for n, v in self._values().items() if n not in self._before}

    def alone(self, ranks: StrategyRanks) -> bool:
        """Whether rank 0 has attributes that other drivers lack, or would lack (collective).

        Rank 0 prints a line on them. All ranks that run the script call this together, after the
        ``setup`` hooks. Where rank 0 runs the script alone, what is still as the hook has set it
        counts. Otherwise the ranks compare the names of their attributes.

        Args:
            ranks: where this process stands.
        """
        is_open = not ranks.joined.has_coordinates
        if not self._owners or not (is_open or ranks.replicas > 1):
            return False
        mine = self._values()
        if ranks.joined.phase is Phase.LONE:
            names = [name for name, value in self._set.items() if mine.get(name) is value]
        else:
            # by names, since values may be large and not comparable
            place = "the comparison of what prepare_data has set"
            first, *others = ranks.joined.gather([*mine], place)
            names = sorted(set(first).difference(set(first).intersection(*map(set, others))))
        if names:
            rank_zero_info(
                f"prepare_data has set {', '.join(sorted(names))} on rank 0 alone, where it runs "
                f"(as under DDP): other replicas do not have it"
                f"{', so there is one' if is_open else ''}. "
                "Set it in setup, which runs on all ranks."
            )
        return bool(names)

    def _values(self) -> dict[str, Any]:
        """The attributes that are not ``None``, by the name of their class and their own."""
        return {
            f"{type(owner).__name__}.{name}": value
            for owner in self._owners
            for name, value in vars(owner).items()
            if value is not None
        }
