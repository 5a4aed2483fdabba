"""The stages of one network on one rank, and their lists of instructions.

Forward and backward passes share this. Lists are made once per number of micro-batches.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lightning_hybrid.comm import (
    CallKey,
    Coordinates,
    Dealt,
    Failure,
    Group,
    Links,
    copies_of,
)
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.graph import Stage
from lightning_hybrid.schedules import (
    STREAMED,
    Copy,
    DelayedWeights,
    Kind,
    deal,
    make_schedule,
    merge,
    together,
)
from lightning_hybrid.stage.batchnorm import Synchronised
from lightning_hybrid.stage.calls import Call
from lightning_hybrid.stage.early_forwards import EarlyForwards
from lightning_hybrid.stage.gradient_averaging import ReplicaGroup
from lightning_hybrid.stage.replayed_statistics import ReplayedStatistics
from lightning_hybrid.stage.trace import Trace


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


class RankStages:
    """The stages of one network on one rank.

    Args:
        stages: this rank's stages of the network, by number.
        placement: where all of its stages are, and how they run.
        options: how stages compute.
        coordinates: this rank.
        links: links of each stage that is here, in their order.
        replica_group: averages the gradients of this rank's stages over the replicas.
        replayed: keeps the running statistics of a stage that has copies.
        device: where the stages live.
        seed: of the random numbers inside the network.
        trace: where to record.

    Attributes:
        owned: the stages of this rank, in their order.
        early: those of them that run forwards before their turn, each with what runs these.
        failure: the first error on this rank or in an earlier stage, for the driver.
        passed: whether the last pass came to its end (an error in a stage does not end a pass).
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        placement: Placement,
        options: StageOptions,
        *,
        coordinates: Coordinates,
        links: Mapping[int, Dealt],
        replica_group: ReplicaGroup,
        replayed: ReplayedStatistics | None = None,
        device: torch.device,
        seed: int,
        trace: Trace,
    ) -> None:
        self.replayed = replayed
        self.coordinates, self.replica_group = coordinates, replica_group
        self.device, self.seed, self.trace = device, seed, trace
        self.failure: Failure | None = None
        self.passed = True
        count, recompute = len(placement.devices), placement.recompute
        streamed = STREAMED.get(placement.schedule)
        delayed = options.delayed_weights if streamed and streamed.delayed else None
        self._ahead = streamed.look_aheads(count)[0] if streamed else 0
        self.shrink, self.recompute = options.shrink, recompute
        self.owned = [
            OwnedStage(
                number,
                [stages[number]],
                both,
                number == count - 1,
                f"stage {number} " if len(links) > 1 else "",
                EarlyForwards(delayed) if streamed else None,
                # (a forward that runs again in the backward would run again for each part of it)
                splits=number in placement.split
                and not (options.compiled or recompute or stages[number].checkpointed),
            )
            for number, both in links.items()
        ]
        self.early = [(own, own.early) for own in self.owned if own.early is not None]
        # Backward goes from the last stage to the first, so the first stage of the rank is the last
        # to have its gradients; when its last backward begins, those of its others are final.
        first, *others = (dict.fromkeys(own.specializations[0].parameters()) for own in self.owned)
        self.done_before = [p for other in others for p in other if p not in first]
        self._placement = placement
        self._compiled = options.compiled
        self._statistics = options.statistics and Synchronised(options.statistics)

    def untaken(self, call: Call) -> int:
        """How many messages may be left that a neighbour has not taken, before a stage waits."""
        return self._ahead * call.key.microbatches

    def lists(self, key: CallKey, *, input_gradient: bool) -> tuple[Todo, Todo]:
        """This rank's instructions for the forward and for the backward of a call with this key."""
        here, microbatches = self.coordinates.pp_rank, key.microbatches
        return lists_of(self._placement, here, microbatches, input_gradient)

    def stage_for(self, own: OwnedStage, key: CallKey) -> Stage:
        """The code of a stage for a call with this key, compiled if that is asked for."""
        stage = own.specializations[key.specialization]
        # at the first use: some graphs of a network never run on a rank
        if self._compiled:
            stage.compile_code()
        return stage

    def statistics(self, key: CallKey) -> AbstractContextManager[Any]:
        """Inside, batch normalisation in training takes its statistics over the replicas."""
        if self._statistics is None or not key.training:
            return nullcontext()
        return self._statistics

    def noting(self, stage: Stage, microbatch: int) -> AbstractContextManager[Any]:
        """Inside, running statistics of a stage with copies are noted, to be replayed later."""
        if self.replayed is None or not stage.written:
            return nullcontext()
        return self.replayed.noting(stage, microbatch)

    def fail(self, error: Exception, stage: int) -> None:
        """Note an error of a stage; from now on this rank only sends and receives, and no more."""
        where = f"in stage {stage}" if self.coordinates.free else ""
        # the first error: it is mostly the cause of later ones
        self.failure = self.failure or Failure.of(error, str(self.coordinates), where)


class Pass:
    """A pass of one stage; each of its public methods carries out the instruction of its name.

    Args:
        engine: the stages of the rank.
        index: which of them.
        call: the call of the network.

    Attributes:
        error: the error that the stage has raised.
    """

    def __init__(self, engine: RankStages, index: int, call: Call) -> None:
        self.engine, self.own, self.call = engine, engine.owned[index], call
        self.index, self.traffic = index, call.traffic[index]
        self.saved = call.saved[index]
        self.error: Exception | None = None

    @contextmanager
    def computing(self, what: str, microbatch: int) -> Iterator[None]:
        """Inside, the stage computes: the time is recorded; an error is noted, and not raised."""
        # (other ranks wait for what this list still has to send)
        try:
            with self.engine.trace.span(f"{self.own.label}{what}", microbatch):
                yield
        except Exception as error:
            self.error = error
            self.engine.fail(error, self.own.number)

    def of_kind(self, todo: Todo, kind: Kind) -> list[int]:
        """The micro-batches of this stage's instructions of a kind, in their order."""
        return [m for index, each, m in todo if index == self.index and each is kind]

    def links(self, microbatch: int) -> Links:
        """The links of a micro-batch that this rank computes."""
        return self.own.links.at(microbatch)

    def do(self, kind: Kind, microbatch: int) -> None:
        """Carry out an instruction."""
        getattr(self, kind.value)(microbatch)
