"""A rank's stages, how they compute, and their lists of instructions.

Lists are made once per number of micro-batches.
"""

import warnings
from dataclasses import dataclass
from functools import lru_cache

from lightning_hybrid.comm import Dealt, Group, copies_of
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.graph import Stage
from lightning_hybrid.schedules import (
    Copy,
    DelayedWeights,
    Kind,
    deal,
    make_schedule,
    merge,
    together,
)
from lightning_hybrid.stage.early_forwards import EarlyForwards


@dataclass(frozen=True)
class StageOptions:
    """How the stages of a run compute, the same on all ranks.

    Attributes:
        compiled: whether they run through ``torch.compile``.
        statistics: the group over which batch normalisation takes its statistics; ``None``: each
            replica by itself.
        delayed_weights: the weights that backwards compute with under a delayed schedule.
        shrink: the factor that gradients are multiplied by at every cut that they cross.
    """

    compiled: bool = False
    statistics: Group = None
    delayed_weights: DelayedWeights = "stash"
    shrink: float = 1.0


@dataclass
class OwnedStage:
    """A stage of this rank.

    Attributes:
        number: of the stage in the network.
        specializations: this stage of each captured graph of the network, by the number that
            :class:`CallKey` has; those of further graphs are added later.
        links: links to its neighbours.
        is_last: whether it is the network's last stage.
        label: the prefix of its spans in a trace, if the rank has several stages.
        early: runs its forwards that come before their turn, under a streamed schedule.
        splits: whether its backward is split; no more once one could not be.
    """

    number: int
    specializations: list[Stage]
    links: Dealt
    is_last: bool
    label: str
    early: EarlyForwards | None
    splits: bool = False

    def go_back_in_one(self, reason: str) -> None:
        """Stop splitting the backward, and warn why."""
        self.splits = False
        warnings.warn(
            f"Stage {self.number} goes back in one from now on, as under schedule='gpipe': "
            f"{reason}.",
            stacklevel=2,
        )


Todo = tuple[tuple[int, Kind, int], ...]
"""A list of instructions of a rank: (index among its stages, instruction, micro-batch)."""


@lru_cache(maxsize=256)
def lists_of(
    placement: Placement, here: int, microbatches: int, input_gradient: bool
) -> tuple[Todo, Todo]:
    """The forward and the backward list of the rank with this ``pp_rank``."""
    ranks = [copies_of(device) for device in placement.devices]
    schedule = make_schedule(
        placement.schedule,
        len(ranks),
        microbatches,
        input_gradient=input_gradient,
        split=placement.split,
    )
    # Every rank makes the lists of all, and takes its own: they follow from the placement alone,
    # which all ranks know, so that no message is needed.
    own = [stage for stage, owners in enumerate(ranks) if here in owners]
    if max(map(len, ranks)) > 1:
        dealt = deal(schedule, [*map(len, ranks)])
        places = [Copy(stage, ranks[stage].index(here)) for stage in own]
        found = [together(lists, places) for lists in (dealt.forward, dealt.backward)]
        steps = [[(place.stage, step) for place, step in each] for each in found]
    else:
        first = [owners[0] for owners in ranks]
        steps = [[*merge(each, first)[here]] for each in (schedule.forward, schedule.backward)]
    forward, backward = (
        tuple([(own.index(stage), i.kind, i.microbatch) for stage, i in each]) for each in steps
    )
    return forward, backward
