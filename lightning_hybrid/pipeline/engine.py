"""The stages of one rank at work: it executes the instruction lists of a schedule.

Mostly a rank has one stage. Under a free placement it has several, and their lists are merged into
one (:mod:`lightning_hybrid.schedules.merged`); each keeps its own links, values and shapes.

The driver and the workers run the same engine. They differ in what stands at the two ends: the
driver, whose last stage is that of the network, feeds the inputs and collects the outputs.

Shapes are exchanged once. The first call with a new :class:`CallKey` sends a header before each
micro-batch; from then on both sides know what comes, a receive is posted before the computation
that precedes it, and only numbers travel.

**A failing rank keeps its appointments**, since nobody can wake a peer that waits in a receive:
after an error it goes on to receive and send what its list says, with zeros, and the error
travels to the driver behind the activations.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid.comm.call_key import CallKey
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.links import Arriving, Links
from lightning_hybrid.comm.messages import Header, Pattern, Status
from lightning_hybrid.comm.protocol import Backward
from lightning_hybrid.comm.specs import TensorSpec
from lightning_hybrid.network import Stage
from lightning_hybrid.network.split_backward import WeightPart, input_part
from lightning_hybrid.pipeline.ahead import Ahead
from lightning_hybrid.pipeline.batchnorm import Synchronised
from lightning_hybrid.pipeline.calls import Call, Gradients, Recipe, Traffic, Values
from lightning_hybrid.pipeline.early import EarlyForwards
from lightning_hybrid.pipeline.lists import Todo, lists_of, schedule_of
from lightning_hybrid.pipeline.random import (
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    set_random_state,
)
from lightning_hybrid.pipeline.recompute import again, forward
from lightning_hybrid.pipeline.replicas import ReplicaGroup
from lightning_hybrid.pipeline.stages import OwnedStage, StageOptions
from lightning_hybrid.pipeline.trace import Trace
from lightning_hybrid.schedules import STREAMED, Kind, Schedule


class Engine:
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

    Attributes:
        owned: the stages of this rank, in their order.
        failure: what went wrong on this rank or before it, for the driver.
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
    ) -> None:
        self.coordinates, self.replica_group = coordinates, replica_group
        self.device, self.seed, self.trace = device, seed, trace
        self.failure: Failure | None = None
        streamed = STREAMED.get(schedule)
        delayed = options.delayed_weights if streamed and streamed.delayed else None
        self._ahead = streamed.look_aheads(len(devices))[0] if streamed else 0
        self.shrink, self.recompute = options.shrink, options.recompute
        self.owned = [
            OwnedStage(
                number,
                [stages[number]],
                both,
                number == len(devices) - 1,
                f"stage {number} " if len(links) > 1 else "",
                EarlyForwards(delayed),
                # what is computed again in the backward would be so for each part
                splits=number in split and not options.compiled and not stages[number].checkpointed,
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

    def forward(self, call: Call, inputs: Sequence[Values] = ()) -> list[Values]:
        """Run the forward list of this rank.

        Args:
            call: the call; what its backward needs is kept in it.
            inputs: on the driver, per micro-batch the values for stage 0.

        Returns:
            On the driver, per micro-batch the network's outputs.

        Raises:
            Exception: on the driver, what a stage raised; caused by a RemoteError if that stage is
                on another rank. On a worker it is kept in ``failure`` and travels to the driver.
        """
        works = [_Forward(self, index, call, inputs) for index in range(len(self.owned))]
        todo, _ = self._lists(call.key, input_gradient=False)
        for index, kind, microbatch in todo:
            getattr(works[index], kind)(microbatch)
        error = next((work.error for work in works if work.error), None)
        for own in self.owned:
            if own.number > 0:
                status = own.links.previous.receive_word(Status)
                self.failure = self.failure or status.failure
            if not own.is_last:
                # what the driver's own stages raise is the driver's to deal with
                mine = self.coordinates.is_driver and error is not None
                own.links.next.send_word(Status(None if mine else self.failure))
        if not self.coordinates.is_driver:
            return []
        if not call.ahead:
            self.owned[-1].links.next.flush()  # from here on the user may change the inputs
        self._raise(error)
        return works[-1].outputs

    def backward(
        self, call: Call, mode: Backward, gradients: Sequence[Gradients] = ()
    ) -> list[Gradients]:
        """Run the backward list of this rank.

        Args:
            call: the call to go back through.
            mode: how.
            gradients: on the driver, per micro-batch the gradients of the network's outputs.

        Returns:
            On the driver, per micro-batch the gradients of the inputs, if it wants them.

        Raises:
            Exception: on the driver, what its own stage raised. On a worker it is kept in
                ``failure``; the driver hears of it with the next forward.
        """
        works = [_Backward(self, index, call, mode, gradients) for index in range(len(self.owned))]
        _, todo = self._lists(call.key, input_gradient=mode.input_gradient)
        for index, kind, microbatch in todo:
            getattr(works[index], kind)(microbatch)
        if mode.reduce:
            self.replica_group.finish()
        self.commit(call)
        if self.coordinates.is_driver:
            self._raise(next((work.error for work in works if work.error), None))
        return works[-1].inputs

    def send_inputs(self, inputs: Sequence[Values]) -> None:
        """On the driver: let stage 0 have the inputs of a call that runs ahead, per micro-batch."""
        for values in inputs:
            self.owned[-1].links.next.send(values)

    def discard(self, call: Call) -> None:
        """Take off the links what the stage before this rank's has sent for a call."""
        scratch = [Traffic() for _ in self.owned] if call.exchange else call.traffic
        work = _Forward(self, 0, replace(call, traffic=scratch), ())
        for microbatch in range(call.key.microbatches):
            work.receive_activation(microbatch)
        work.links.previous.receive_word(Status)

    def commit(self, call: Call) -> None:
        """A call has had its turn."""
        if call.ahead:
            for own in self.owned:
                own.early.commit(call.number, self.stage_for(own, call.key))

    def drop(self, call: Call) -> None:
        """A call that ran ahead is not wanted."""
        for own in self.owned:
            own.early.drop(call.number)

    def untaken(self, call: Call) -> int:
        """How many messages of a call's kind may wait for a neighbour before a stage waits too."""
        return self._ahead * call.key.microbatches

    def add_specialization(self, stages: Mapping[int, Stage]) -> None:
        """Take the stages of another graph of the same network."""
        for own in self.owned:
            own.specializations.append(stages[own.number])

    def _lists(self, key: CallKey, *, input_gradient: bool) -> tuple[Todo, Todo]:
        here, microbatches = self.coordinates.pp_rank, key.microbatches
        return lists_of(
            self._schedule_name, self._devices, here, microbatches, input_gradient, self._split
        )

    def schedule(self, key: CallKey, *, input_gradient: bool) -> Schedule:
        """What each stage does in a call."""
        return schedule_of(
            self._schedule_name, len(self._devices), key.microbatches, input_gradient, self._split
        )

    def stage_for(self, own: OwnedStage, key: CallKey) -> Stage:
        """The graph of a stage that a call needs."""
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
        self.failure = self.failure or Failure.of(error, str(self.coordinates), where)

    def _raise(self, error: Exception | None) -> None:
        failure, self.failure = self.failure, None
        if error is not None:
            raise error  # the driver's own, as it is: the user may catch it and go on
        if failure is not None:
            raise failure.exception()


class _Forward:
    """A forward pass of one stage; its methods are named after the instructions they carry out."""

    def __init__(self, engine: Engine, index: int, call: Call, inputs: Sequence[Values]) -> None:
        self.engine, self.own, self.call = engine, engine.owned[index], call
        self.links, self.traffic, self.saved = (
            self.own.links,
            call.traffic[index],
            call.saved[index],
        )
        self.inputs = inputs
        self.outputs: list[Values] = []
        self.error: Exception | None = None
        self._values: Values | None = None
        self._result: Values | None = None
        self._first = self.own.number == 0
        # what the generators' state looks like on the way; nothing if it does not travel
        self._states = (
            [TensorSpec.of(state) for state in random_state(engine.device)] if call.uses_rng else []
        )
        self._takes_states = call.uses_rng and (not self._first or call.key.continues)
        self._previous_failed = False
        self._told_failure = False
        self.links.next.flush(engine.untaken(call))  # frees what an earlier pass sent
        if call.exchange:
            self.traffic.outgoing = []
            self.traffic.incoming = (
                [list(specs) for specs in call.key.inputs] if self._first else []
            )
            self._ahead = None
        else:
            steps = engine.schedule(call.key, input_gradient=False).forward[self.own.number]
            self._ahead = Ahead(steps, Kind.RECEIVE_ACTIVATION, self._post)

    def send_input(self, microbatch: int) -> None:
        if not self.call.ahead:  # else they are there already
            self.links.next.send(self.inputs[microbatch])

    def receive_activation(self, microbatch: int) -> None:
        if self._ahead is not None:
            self._values = self._ahead.take(microbatch)
            return
        self._values = None
        if not self._first and not self._previous_failed:
            header = self.links.previous.receive_word(Header)
            if header.specs is None:
                self._previous_failed = True
            else:
                self.traffic.incoming.append(header.specs)
                self.traffic.uses_rng |= header.uses_rng
        if not self._previous_failed:
            self._values = self._post(microbatch).wait()

    def forward(self, microbatch: int) -> None:
        engine, self._result = self.engine, None
        if self._values is None or engine.failure is not None:
            return
        try:
            with engine.trace.span(f"{self.own.label}forward", microbatch):
                self._result = self._run(microbatch, self._values)
        except Exception as error:
            self.error = error
            engine.fail(error, self.own.number)
        else:
            self.outputs.append(self._result)

    def send_activation(self, microbatch: int) -> None:
        if self.call.exchange:
            self._send_header()
            if self._result is None:
                return
        values = self._result
        if values is None:
            specs = [*self.traffic.outgoing[microbatch], *self._states]
            values = [spec.zeros(self.engine.device) for spec in specs]
        self.links.next.send(values)

    def _post(self, microbatch: int) -> Arriving:
        specs = self.traffic.incoming[microbatch]
        states = [] if self._first else self._states
        return self.links.previous.post([*specs, *states])

    def _send_header(self) -> None:
        """Shapes of the values that follow; an empty header, once, if this stage has failed."""
        if self._result is not None:
            crossing = self._result[: len(self._result) - len(self._states)]
            specs = [TensorSpec.of(value) for value in crossing]
            self.traffic.outgoing.append(specs)
            self.links.next.send_word(Header(specs, self.traffic.uses_rng))
        elif not self._told_failure:
            self._told_failure = True
            self.links.next.send_word(Header())

    def _run(self, microbatch: int, values: Values) -> Values:
        engine, call = self.engine, self.call
        with ExitStack() as stack:
            before: Values = []
            if call.uses_rng:
                seed = microbatch_seed(
                    engine.seed, engine.coordinates.dp_rank, call.draw, microbatch
                )
                start = None if self._takes_states else seed
                stack.enter_context(generators_of_microbatch(start, engine.device))
                if self._takes_states:
                    cut = len(values) - len(self._states)
                    values, states = values[:cut], values[cut:]
                    set_random_state(states, engine.device)
                before = random_state(engine.device)
            outputs = self._compute(microbatch, values, before)
            if not call.uses_rng:
                return outputs
            after = random_state(engine.device)
            self.traffic.uses_rng |= not all(torch.equal(a, b) for a, b in zip(before, after))
            if not self.own.is_last:
                return [*outputs, *after]
            call.states = after
            return outputs

    def _compute(self, microbatch: int, values: Values, states: Values) -> Values:
        stage = self.engine.stage_for(self.own, self.call.key)
        numbers = self.call.key.numbers[microbatch]
        if not self.call.key.grad:
            with self.engine.statistics(self.call.key):
                return stage(values, numbers)
        specs = self.traffic.incoming[microbatch]
        values = [v.detach().requires_grad_(s.requires_grad) for v, s in zip(values, specs)]
        if self.call.ahead and not self.own.is_last:
            outputs, self.saved[microbatch] = self.own.early.forward(
                self.call.number, stage, values, numbers, states
            )
            return outputs
        with self.engine.statistics(self.call.key), self.own.looks_for_hooks():
            if self.engine.recompute:
                outputs, self.saved[microbatch] = forward(stage, values, numbers, states)
                return outputs
            with torch.enable_grad(), own_saved_tensors():
                outputs = stage(values, numbers)
        self.own.early.refuse_kept_weights(stage, outputs)
        self.saved[microbatch] = (values, outputs)
        return outputs


class _Backward:
    """A backward pass of one stage; its methods are named like the instructions."""

    def __init__(
        self,
        engine: Engine,
        index: int,
        call: Call,
        mode: Backward,
        gradients: Sequence[Gradients],
    ) -> None:
        self.engine, self.own, self.call, self.mode = engine, engine.owned[index], call, mode
        self.links, self.traffic, self.saved = (
            self.own.links,
            call.traffic[index],
            call.saved[index],
        )
        self._reduces_last = index == 0
        self.gradients = gradients
        self.inputs: list[Gradients] = [[] for _ in range(call.key.microbatches)]
        self.error: Exception | None = None
        self._arrived: Gradients = []
        self._result: Gradients = []
        self._put_off: dict[int, WeightPart] = {}
        self._last = call.key.microbatches - 1
        self.links.previous.flush(engine.untaken(call))
        schedule = engine.schedule(call.key, input_gradient=mode.input_gradient)
        steps = schedule.backward[self.own.number]
        # the last stage receives only the gradients of the inputs, which nobody computes with
        kind = Kind.RECEIVE_INPUT_GRADIENT if self.own.is_last else Kind.RECEIVE_GRADIENT
        self._ahead = Ahead(steps, kind, self._post)

    def receive_gradient(self, microbatch: int) -> None:
        present = self._hear_pattern()
        arrived = iter(self._ahead.take(microbatch))
        self._arrived = [self._shrunk(next(arrived)) if here else None for here in present]

    def receive_input_gradient(self, microbatch: int) -> None:
        present = self._hear_pattern()
        arrived = iter(self._ahead.take(microbatch))
        self.inputs[microbatch] = [next(arrived) if here else None for here in present]

    def reduce(self, microbatch: int) -> None:
        if self.mode.reduce and self._reduces_last:
            self.engine.replica_group.arm(self.engine.done_before)

    def backward(self, microbatch: int) -> None:
        engine = self.engine
        gradients = self.gradients[microbatch] if self.own.is_last else self._arrived
        self._result = [None] * len(self.traffic.incoming[microbatch])
        if engine.failure is not None:
            return
        try:
            # activation checkpointing runs layers again here
            span = engine.trace.span(f"{self.own.label}backward", microbatch)
            with span, engine.statistics(self.call.key):
                self._result = self._run(microbatch, gradients)
        except Exception as error:
            self.error = error
            engine.fail(error, self.own.number)

    def weight(self, microbatch: int) -> None:
        """Add the gradients of the weights; they are there if the backward was not split."""
        engine, part = self.engine, self._put_off.pop(microbatch, None)
        if part is None or engine.failure is not None:
            return
        try:
            with engine.trace.span(f"{self.own.label}weight", microbatch):
                part.run(keep=self.mode.keep)
        except Exception as error:
            self.error = error
            engine.fail(error, self.own.number)

    def send_gradient(self, microbatch: int) -> None:
        traffic, links = self.traffic, self.links
        if self.mode.exchange and microbatch == self._last:
            pattern = [gradient is not None for gradient in self._result]
            traffic.gradients_out[self.mode.pattern] = pattern
            links.previous.send_word(Pattern(pattern))
        rows = zip(
            self._result,
            traffic.incoming[microbatch],
            traffic.gradients_out[self.mode.pattern],
        )
        links.previous.send(
            [
                spec.zeros(self.engine.device) if gradient is None else gradient
                for gradient, spec, here in rows
                if here
            ]
        )

    def _shrunk(self, gradient: Tensor) -> Tensor:
        return gradient if self.engine.shrink == 1 else gradient * self.engine.shrink

    def _hear_pattern(self) -> list[bool]:
        """Which of the values sent forward get a gradient: told once per pattern."""
        known = self.traffic.gradients_in
        if self.mode.pattern not in known:
            known[self.mode.pattern] = self.links.next.receive_word(Pattern).present
        return known[self.mode.pattern]

    def _post(self, microbatch: int) -> Arriving:
        inputs, outgoing = self.call.key.inputs, self.traffic.outgoing
        sent = inputs[microbatch] if self.own.is_last else outgoing[microbatch]
        present = self.traffic.gradients_in[self.mode.pattern]
        return self.links.next.post([s for s, here in zip(sent, present) if here])

    def _run(self, microbatch: int, gradients: Gradients) -> Gradients:
        keep = self.mode.keep
        saved = self.saved[microbatch] if keep else self.saved.pop(microbatch)
        values, outputs = self._again(microbatch, saved) if isinstance(saved, Recipe) else saved
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients)
            if gradient is not None and output.requires_grad
        ]
        wanted = [value for value in values if value.requires_grad]
        if not pairs or not (self.mode.parameters or wanted):
            return [None] * len(values)
        roots, starts = [root for root, _ in pairs], [start for _, start in pairs]
        if self.mode.parameters:
            if self.own.splits and wanted:
                parts = input_part(roots, starts, wanted)
                if parts is not None:
                    found, self._put_off[microbatch] = parts
                    by_value = iter(found)
                    return [next(by_value) if value.requires_grad else None for value in values]
            torch.autograd.backward(roots, starts, retain_graph=keep)
            result = [value.grad for value in values]
            for value in wanted:
                value.grad = None
            return result
        found = [*torch.autograd.grad(roots, wanted, starts, retain_graph=keep, allow_unused=True)]
        by_value = iter(found)
        return [next(by_value) if value.requires_grad else None for value in values]

    def _again(self, microbatch: int, recipe: Recipe) -> tuple[Values, list[Any]]:
        """Run a forward again whose activations were not kept."""
        engine, key = self.engine, self.call.key
        with ExitStack() as stack:
            stack.enter_context(key.precision.applied())
            if recipe.states:
                stack.enter_context(generators_of_microbatch(None, engine.device))
                set_random_state(recipe.states, engine.device)
            stage = engine.stage_for(self.own, key)
            return again(stage, recipe, key.numbers[microbatch])
