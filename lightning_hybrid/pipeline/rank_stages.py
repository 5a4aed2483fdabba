"""The stages of one network on one rank, and how they compute: what its passes have in common."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_hybrid.comm import CallKey, Coordinates, Failure, Links
from lightning_hybrid.network import Stage
from lightning_hybrid.pipeline.batchnorm import Synchronised
from lightning_hybrid.pipeline.calls import Call
from lightning_hybrid.pipeline.early_forwards import EarlyForwards
from lightning_hybrid.pipeline.gradient_averaging import ReplicaGroup
from lightning_hybrid.pipeline.instruction_lists import schedule_of
from lightning_hybrid.pipeline.stage_options import OwnedStage, StageOptions
from lightning_hybrid.pipeline.trace import Trace
from lightning_hybrid.schedules import STREAMED, Kind, Schedule


class RankStages:
    """The stages of one network on one rank.

    Args:
        stages: this rank's stages of the network, by number.
        devices: ``pp_rank`` of each stage of the network.
        coordinates: this rank.
        links: of each stage that is here, in their order.
        replica_group: averages the gradients of this rank's stages over the replicas.
        device: where the stages live.
        schedule: name of the schedule.
        seed: of the random numbers inside the network.
        trace: where to record.
        options: how stages compute.
        split: numbers of the stages whose backward the schedule splits.
        recompute: whether forwards keep no activations, and run again for their backward.

    Attributes:
        owned: the stages of this rank, in their order.
        failure: what went wrong on this rank or before it, for the driver.
        passed: whether the last pass came to its end: what fails in a stage does not end it.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        devices: Sequence[int],
        coordinates: Coordinates,
        links: Mapping[int, Links],
        replica_group: ReplicaGroup,
        device: torch.device,
        schedule: str,
        seed: int,
        trace: Trace,
        options: StageOptions,
        split: Sequence[int] = (),
        recompute: bool = False,
    ) -> None:
        self.coordinates, self.replica_group = coordinates, replica_group
        self.device, self.seed, self.trace = device, seed, trace
        self.failure: Failure | None = None
        self.passed = True
        streamed = STREAMED.get(schedule)
        delayed = options.delayed_weights if streamed and streamed.delayed else None
        self._ahead = streamed.look_aheads(len(devices))[0] if streamed else 0
        self.shrink, self.recompute = options.shrink, recompute
        self.owned = [
            OwnedStage(
                number,
                [stages[number]],
                both,
                number == len(devices) - 1,
                f"stage {number} " if len(links) > 1 else "",
                EarlyForwards(delayed),
                # what is computed again in the backward would be so for each part
                splits=number in split
                and not (options.compiled or recompute or stages[number].checkpointed),
            )
            for number, both in links.items()
        ]
        # the first stage of the rank is the last to have its gradients
        first, *others = (dict.fromkeys(own.specializations[0].parameters()) for own in self.owned)
        self.done_before = [p for other in others for p in other if p not in first]
        self._schedule_name, self._devices = schedule, tuple(devices)
        self._split = tuple(split)
        self._compiled = options.compiled
        self._statistics = options.statistics and Synchronised(options.statistics)

    def untaken(self, call: Call) -> int:
        """How many messages of a call's kind may wait for a neighbour before a stage waits too."""
        return self._ahead * call.key.microbatches

    def schedule(self, key: CallKey, *, input_gradient: bool) -> Schedule:
        """The instruction lists of all stages for a call of this kind."""
        return schedule_of(
            self._schedule_name, len(self._devices), key.microbatches, input_gradient, self._split
        )

    def stage_for(self, own: OwnedStage, key: CallKey) -> Stage:
        """The code of a stage for a call of this kind, compiled where that is asked for."""
        stage = own.specializations[key.specialization]
        if self._compiled:
            stage.compile_code()
        return stage

    def statistics(self, key: CallKey) -> AbstractContextManager[Any]:
        """Inside, batch normalisation in training takes its statistics over the replicas."""
        if self._statistics is None or not key.training:
            return nullcontext()
        return self._statistics

    def fail(self, error: Exception, stage: int) -> None:
        """Note an error of a stage; from now on this rank only keeps its appointments."""
        where = f"in stage {stage}" if self.coordinates.free else ""
        # the first one: what fails after it mostly fails by it
        self.failure = self.failure or Failure.of(error, str(self.coordinates), where)


class Pass:
    """A pass of one stage; each of its public methods carries out the instruction of its name.

    Args:
        engine: the stages of the rank.
        index: which of them.
        call: what passes.

    Attributes:
        error: what the stage has raised.
    """

    def __init__(self, engine: RankStages, index: int, call: Call) -> None:
        self.engine, self.own, self.call = engine, engine.owned[index], call
        self.links, self.traffic = self.own.links, call.traffic[index]
        self.saved = call.saved[index]
        self.error: Exception | None = None

    def do(self, kind: Kind, microbatch: int) -> None:
        """Carry out an instruction."""
        getattr(self, kind.value)(microbatch)
