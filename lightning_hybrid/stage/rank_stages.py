"""The stages of a rank: how they compute, their lists of instructions, and shared weights.

Every rank knows the placement, and computes all of this from it without a message.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from lightning_hybrid.comm import Devices, Group, Inside, LinksByMicrobatch, copies_of, stages_of
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import Stage
from lightning_hybrid.schedules import (
    INSIDE,
    DelayedWeights,
    Instruction,
    InstructionKind,
    Schedule,
    StageCopy,
    by_device,
    deal,
    in_one_order,
    make_schedule,
    one_f_one_b,
    together,
)
from lightning_hybrid.stage.early_forwards import EarlyForwards


@dataclass(frozen=True)
class StageOptions:
    """How the stages of a run compute, the same on all ranks.

    Attributes:
        compiled: whether they run through ``torch.compile``.
        statistics: the group over which batch normalisation takes its statistics
            (``sync_batchnorm``); ``None``: each replica takes its own.
        delayed_weights: the weights that backwards compute with under a delayed schedule, in which
            optimizers step between a forward and its backward (``Delayed(weights=...)``).
        shrink: the factor that gradients are multiplied by at every cut that they cross
            (``Delayed("fdg", shrink=...)``); else 1.
    """

    compiled: bool = False
    statistics: Group = None
    delayed_weights: DelayedWeights = "stash"
    shrink: float = 1.0


@dataclass
class OwnedStage:
    """A stage of this rank.

    Attributes:
        number: number of the stage in the network.
        specializations: the code of this stage for each captured graph of the network, at the index
            ``CallKey.specialization``; further graphs are appended during a run.
        links: links to the neighbouring stages.
        is_last: whether it is the network's last stage.
        label: the prefix of the names of its spans in a trace; empty if the rank has one stage.
        early: runs its forwards that come before their turn; ``None``: the schedule is not
            streamed.
        splits: whether its backward is split into two parts (`zero_bubble`, `1f1b`); set to false
            when a backward could not be split (:meth:`go_back_in_one`).
    """

    number: int
    specializations: list[Stage]
    links: LinksByMicrobatch
    is_last: bool
    label: str
    early: EarlyForwards | None
    splits: bool = False

    def go_back_in_one(self, reason: str) -> None:
        """Stop splitting this stage's backward from now on, and warn the user.

        Args:
            reason: why it cannot be split, for the warning.
        """
        self.splits = False
        warnings.warn(
            f"Stage {self.number} goes back in one from now on, as under schedule='gpipe': "
            f"{reason}.",
            stacklevel=2,
        )


Todo = tuple[tuple[int, InstructionKind, int], ...]
"""A list of instructions of a rank: (index of the stage among the rank's stages, kind of
instruction, number of the micro-batch)."""


@lru_cache(maxsize=256)
def lists_of(
    placement: Placement,
    here: int,
    microbatches: int,
    input_gradient: bool,
    inside: Inside = "",
) -> tuple[Todo, Todo]:
    """Make the lists of instructions of one rank for a call of the network.

    Args:
        placement: where all stages are, and their schedule.
        here: ``pp_rank`` of the rank.
        microbatches: number of micro-batches in the call.
        input_gradient: whether the driver wants the gradients of the network's inputs.
        inside: the order of micro-batches, if backwards run inside of the call (`1f1b`); empty:
            they do not.

    Returns:
        A pair: the list for the forward and the list for the backward. With ``inside`` the first
        list has the backwards too, and the second list is not used.
    """
    ranks = [copies_of(device) for device in placement.devices]
    name = placement.schedule
    if inside:
        falls = inside == "falling"
        schedule = one_f_one_b(len(ranks), microbatches, falls=falls, split=placement.split)
    else:
        schedule = make_schedule(
            "gpipe" if name == INSIDE else name,  # (not every call has its backwards inside)
            len(ranks),
            microbatches,
            input_gradient=input_gradient,
            split=placement.split if name != INSIDE else (),
        )
    # every rank makes the lists of all, and takes its own
    own = stages_of(placement.devices, here)
    forward, backward = (
        tuple([(own.index(stage), i.kind, i.microbatch) for (stage, _), i in lists[here]])
        for lists in _ordered(schedule, placement.devices, ranks)
    )
    return forward, backward


def _ordered(
    schedule: Schedule, devices: Devices, ranks: Sequence[tuple[int, ...]]
) -> Iterator[list[list[tuple[StageCopy, Instruction]]]]:
    """Give each rank its instructions, in an order without deadlock.

    Args:
        schedule: the instructions of each stage.
        devices: ``pp_rank`` of each stage, or of each of its copies.
        ranks: the same, always as tuples: of one rank if a stage has no copies.

    Yields:
        Two results, for the forward and for the backward. Each has, at the index ``pp_rank``, the
            list of that rank: pairs of a copy of a stage, and the instruction for it.
    """
    dealt = deal(schedule, [*map(len, ranks)])
    here = range(1 + max(map(max, ranks)))
    places = [
        [StageCopy(s, ranks[s].index(rank)) for s in stages_of(devices, rank)] for rank in here
    ]
    if max(map(len, ranks)) > 1:
        for copies in (dealt.forward, dealt.backward):
            yield in_one_order([together(copies, own) for own in places], dealt.peer)
        return
    for merged in by_device(schedule, [owner for (owner,) in ranks]):
        lists = [[(StageCopy(stage, 0), step) for stage, step in steps] for steps in merged]
        yield in_one_order(lists, dealt.peer)


def borrowed_parameters(network: nn.Module, placement: Placement) -> list[frozenset[str]]:
    """For each rank, find the parameters that it uses and another rank of its replica owns.

    The owner has their values, and their gradients are brought to it. It is the rank of the
    earliest stage that uses the parameter, but the driver only if no other rank uses it: the driver
    has proxies for parameters that it borrows. Copies of a stage borrow nothing from each other.

    Args:
        network: the whole network.
        placement: where its stages are.

    Returns:
        By ``pp_rank``, the names in the network of these parameters.

    Raises:
        NetworkError: a stage that has copies shares a parameter with another stage.
    """
    stages = _parameters_of_stages(network, placement)
    ranks = [copies_of(device) for device in placement.devices]
    _refuse_tied_copies(stages, ranks)
    used: list[set[str]] = [set() for _ in range(max(map(max, ranks)) + 1)]
    owner: dict[str, int] = {}
    for names, (device, *_) in zip(stages, ranks):
        used[device] |= names
        for name in names:
            # (`or`, so that the driver, rank 0, gives way to any later rank)
            owner[name] = owner.get(name) or device
    return [
        frozenset(name for name in names if owner[name] != rank) for rank, names in enumerate(used)
    ]


def lent_parameters(network: nn.Module, placement: Placement) -> list[frozenset[str]]:
    """For each rank, find the parameters that it owns and the driver of its replica uses too.

    Args:
        network: the whole network.
        placement: where its stages are.

    Returns:
        By ``pp_rank``, the names in the network of these parameters.
    """
    driver = 0
    # (`borrowed` lacks the parameters of a stage that the driver has a copy of: the rank with the
    # first copy lends the driver all of them)
    borrowed = borrowed_parameters(network, placement)
    lent: list[set[str]] = [set() for _ in borrowed]
    for names, device in zip(_parameters_of_stages(network, placement), placement.devices):
        owner, *others = copies_of(device)
        tied = borrowed[driver] - borrowed[owner]
        lent[owner] |= names if driver in others else names & tied
    return [frozenset(names) for names in lent]


def _parameters_of_stages(network: nn.Module, placement: Placement) -> list[frozenset[str]]:
    """For each stage, in their order, the names of the parameters that it uses."""
    parameters = {name for name, _ in network.named_parameters()}
    return [names & parameters for names in placement.owned]


def _refuse_tied_copies(stages: Sequence[frozenset[str]], ranks: Sequence[tuple[int, ...]]) -> None:
    for number, (names, copies) in enumerate(zip(stages, ranks)):
        others = {name for k, each in enumerate(stages) if k != number for name in each}
        if len(copies) > 1 and (tied := sorted(others & names)):
            raise NetworkError(
                f"stage {number} has {len(copies)} copies, and shares parameter {tied[0]!r} with "
                "another stage: a stage with copies has its weights to itself. Cut elsewhere (the "
                "strategy's plan=[...]), so that one stage has all uses, or give it one copy "
                "(pipeline_parallel_size)."
            )
