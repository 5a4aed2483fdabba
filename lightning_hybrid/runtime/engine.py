"""One rank's stage at work: it executes the instruction lists of a schedule.

The driver and the workers run the same engine. They differ in what stands at the two ends: the
driver feeds the inputs and collects the outputs, a worker passes values on.

Shapes are exchanged once. The first call with a new :class:`CallKey` sends a header before each
micro-batch; from then on both sides know what comes, a receive is posted before the computation
that precedes it, and only numbers travel.

**A failing stage keeps its appointments**, since nobody can wake a peer that waits in a receive:
after an error it goes on to receive and send what its list says, with zeros, and the error
travels to the driver behind the activations.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from lightning_hybrid.compat import own_saved_tensors
from lightning_hybrid.errors import RemoteError
from lightning_hybrid.network import Stage
from lightning_hybrid.runtime.batchnorm import Synchronised
from lightning_hybrid.runtime.calls import (
    BackwardMode,
    Call,
    CallKey,
    Gradients,
    Values,
)
from lightning_hybrid.runtime.links import Links
from lightning_hybrid.runtime.mesh import Group, Place
from lightning_hybrid.runtime.random import (
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    set_random_state,
)
from lightning_hybrid.runtime.replicas import Copies
from lightning_hybrid.runtime.trace import Trace
from lightning_hybrid.runtime.transport import Arrival, TensorSpec
from lightning_hybrid.schedules import SCHEDULES, Instruction, Kind, Schedule

_FRAME = 0  # headers and status lines need no operation: who waits knows for what


@dataclass(frozen=True)
class StageOptions:
    """How the stages of a run compute, the same on all ranks.

    Attributes:
        compiled: by ``torch.compile``.
        statistics: the group over which batch normalisation takes its statistics; ``None``: each
            replica by itself.
    """

    compiled: bool = False
    statistics: Group = None


@lru_cache(maxsize=256)
def _schedule(name: str, stages: int, microbatches: int, input_gradient: bool) -> Schedule:
    return SCHEDULES[name](stages, microbatches, input_gradient=input_gradient)


class Engine:
    """One stage of one network on one rank.

    Args:
        stages: the part of the network that this rank owns, in each of its variants (see
            :class:`CallKey`); the first one is enough to begin with.
        place: this rank.
        links: to its neighbours.
        copies: averages the stage's gradients over the replicas.
        device: where the stage lives.
        schedule: name of the schedule.
        seed: of the random numbers inside the network.
        trace: where to record.
        options: how stages compute.

    Attributes:
        failure: what went wrong on this rank or before it, as text for the driver.
    """

    def __init__(
        self,
        stages: list[Stage],
        place: Place,
        links: Links,
        copies: Copies,
        device: torch.device,
        schedule: str,
        seed: int,
        trace: Trace,
        options: StageOptions,
    ) -> None:
        self.stages, self.place, self.links, self.copies = stages, place, links, copies
        self.device, self.seed, self.trace = device, seed, trace
        self.failure: str | None = None
        self._schedule_name = schedule
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
            RemoteError: on the driver, another stage failed.
            Exception: on the driver, what its own stage raised. On a worker it is kept in
                ``failure`` and travels to the driver.
        """
        work = _Forward(self, call, inputs)
        for step in self._schedule(call.key, False).forward[self.place.stage]:
            getattr(work, step.kind)(step.microbatch)
        if self.place.stage > 0:
            _, _, text = self.links.control.hear(self.links.previous)
            self.failure = self.failure or text
        if not self.place.is_driver:
            self.links.control.tell(self.links.next, _FRAME, payload=self.failure)
            return []
        self.links.activations_out.flush()  # from here on the user may change the inputs
        self._raise(work.error)
        return work.outputs

    def backward(
        self, call: Call, mode: BackwardMode, gradients: Sequence[Gradients] = ()
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
        work = _Backward(self, call, mode, gradients)
        for step in self._schedule(call.key, mode.input_gradient).backward[self.place.stage]:
            getattr(work, step.kind)(step.microbatch)
        if mode.reduce:
            self.copies.finish()
        if self.place.is_driver:
            self._raise(work.error)
        return work.inputs

    def _schedule(self, key: CallKey, input_gradient: bool) -> Schedule:
        return _schedule(self._schedule_name, self.place.stages, key.microbatches, input_gradient)

    def stage_for(self, key: CallKey) -> Stage:
        """The variant of the stage that a call needs."""
        stage = self.stages[key.variant]
        if self._compiled:
            stage.compile_code()
        return stage

    def statistics(self, key: CallKey) -> AbstractContextManager[Any]:
        """Inside, batch normalisation in training takes its statistics over the replicas."""
        if self._statistics is None or not key.training[0]:
            return nullcontext()
        return self._statistics

    def fail(self, error: Exception) -> None:
        """Note an error of this stage; from now on it only keeps its appointments."""
        text = "".join(traceback.format_exception(error))
        self.failure = self.failure or f"{self.place} failed:\n{text}"

    def _raise(self, error: Exception | None) -> None:
        text, self.failure = self.failure, None
        if error is not None:
            raise error  # the driver's own, as it is: the user may catch it and go on
        if text is not None:
            raise RemoteError(text)


class _Forward:
    """A forward pass; its methods are named after the instructions they carry out."""

    def __init__(self, engine: Engine, call: Call, inputs: Sequence[Values]) -> None:
        self.engine, self.call = engine, call
        self.inputs = inputs
        self.outputs: list[Values] = []
        self.error: Exception | None = None
        self._values: Values | None = None
        self._result: Values | None = None
        self._first = engine.place.stage == 0
        # what the generators' state looks like on the way; nothing if it does not travel
        self._states = (
            [TensorSpec.of(state) for state in random_state(engine.device)] if call.draws else []
        )
        self._previous_failed = False
        self._told_failure = False
        engine.links.activations_out.flush()
        if call.exchange:
            call.traffic.outgoing = []
            call.traffic.incoming = (
                [list(specs) for specs in call.key.inputs] if self._first else []
            )
            self._ahead = None
        else:
            steps = engine._schedule(call.key, False).forward[engine.place.stage]
            self._ahead = Ahead(steps, Kind.RECEIVE_ACTIVATION, self._post)

    def send_input(self, microbatch: int) -> None:
        self.engine.links.activations_out.send(self.inputs[microbatch])

    def receive_activation(self, microbatch: int) -> None:
        if self._ahead is not None:
            self._values = self._ahead.take(microbatch)
            return
        self._values = None
        if not self._first and not self._previous_failed:
            _, _, header = self.engine.links.control.hear(self.engine.links.previous)
            if header is None:
                self._previous_failed = True
            else:
                specs, draws = header
                self.call.traffic.incoming.append(specs)
                self.call.traffic.draws |= draws
        if not self._previous_failed:
            self._values = self._post(microbatch).wait()

    def forward(self, microbatch: int) -> None:
        engine, self._result = self.engine, None
        if self._values is None or engine.failure is not None:
            return
        try:
            with engine.trace.span("forward", microbatch):
                self._result = self._run(microbatch, self._values)
        except Exception as error:
            self.error = error
            engine.fail(error)
        else:
            self.outputs.append(self._result)

    def send_activation(self, microbatch: int) -> None:
        if self.call.exchange:
            self._send_header()
            if self._result is None:
                return
        values = self._result
        if values is None:
            specs = [*self.call.traffic.outgoing[microbatch], *self._states]
            values = [spec.zeros(self.engine.device) for spec in specs]
        self.engine.links.activations_out.send(values)

    def _post(self, microbatch: int) -> Arrival:
        specs = self.call.traffic.incoming[microbatch]
        states = [] if self._first else self._states
        return self.engine.links.activations_in.post([*specs, *states])

    def _send_header(self) -> None:
        """Shapes of the values that follow; an empty header, once, if this stage has failed."""
        control, peer = self.engine.links.control, self.engine.links.next
        if self._result is not None:
            crossing = self._result[: len(self._result) - len(self._states)]
            specs = [TensorSpec.of(value) for value in crossing]
            self.call.traffic.outgoing.append(specs)
            control.tell(peer, _FRAME, payload=(specs, self.call.traffic.draws))
        elif not self._told_failure:
            self._told_failure = True
            control.tell(peer, _FRAME)

    def _run(self, microbatch: int, values: Values) -> Values:
        engine, call = self.engine, self.call
        with ExitStack() as stack:
            before: Values = []
            if call.draws:
                seed = microbatch_seed(engine.seed, engine.place.replica, call.draw, microbatch)
                start = seed if self._first else None
                stack.enter_context(generators_of_microbatch(start, engine.device))
                if not self._first:
                    cut = len(values) - len(self._states)
                    values, states = values[:cut], values[cut:]
                    set_random_state(states, engine.device)
                before = random_state(engine.device)
            outputs = self._compute(microbatch, values)
            if not call.draws:
                return outputs
            after = random_state(engine.device)
            call.traffic.draws |= not all(torch.equal(a, b) for a, b in zip(before, after))
            return outputs if engine.place.is_driver else [*outputs, *after]

    def _compute(self, microbatch: int, values: Values) -> Values:
        stage = self.engine.stage_for(self.call.key)
        if not self.call.key.grad:
            with self.engine.statistics(self.call.key):
                return cast(Values, stage(values))
        specs = self.call.traffic.incoming[microbatch]
        values = [v.detach().requires_grad_(s.requires_grad) for v, s in zip(values, specs)]
        with torch.enable_grad(), own_saved_tensors(), self.engine.statistics(self.call.key):
            outputs = cast(Values, stage(values))
        self.call.saved[microbatch] = (values, outputs)
        return outputs


class _Backward:
    """A backward pass; its methods are named after the instructions they carry out."""

    def __init__(
        self, engine: Engine, call: Call, mode: BackwardMode, gradients: Sequence[Gradients]
    ) -> None:
        self.engine, self.call, self.mode = engine, call, mode
        self.gradients = gradients
        self.inputs: list[Gradients] = [[] for _ in range(call.key.microbatches)]
        self.error: Exception | None = None
        self._arrived: Gradients = []
        self._result: Gradients = []
        self._last = call.key.microbatches - 1
        engine.links.gradients_out.flush()
        steps = engine._schedule(call.key, mode.input_gradient).backward[engine.place.stage]
        # the driver receives only the gradients of the inputs, which nobody computes with
        kind = Kind.RECEIVE_INPUT_GRADIENT if engine.place.is_driver else Kind.RECEIVE_GRADIENT
        self._ahead = Ahead(steps, kind, self._post)

    def receive_gradient(self, microbatch: int) -> None:
        present = self._hear_pattern()
        arrived = iter(self._ahead.take(microbatch))
        self._arrived = [next(arrived) if here else None for here in present]

    def receive_input_gradient(self, microbatch: int) -> None:
        present = self._hear_pattern()
        arrived = iter(self._ahead.take(microbatch))
        self.inputs[microbatch] = [next(arrived) if here else None for here in present]

    def reduce(self, microbatch: int) -> None:
        if self.mode.reduce:
            self.engine.copies.arm()

    def backward(self, microbatch: int) -> None:
        engine = self.engine
        driver = engine.place.is_driver
        gradients = self.gradients[microbatch] if driver else self._arrived
        self._result = [None] * len(self.call.traffic.incoming[microbatch])
        if engine.failure is not None:
            return
        try:
            # activation checkpointing runs layers again here
            with engine.trace.span("backward", microbatch), engine.statistics(self.call.key):
                self._result = self._run(microbatch, gradients)
        except Exception as error:
            self.error = error
            engine.fail(error)

    def send_gradient(self, microbatch: int) -> None:
        traffic, links = self.call.traffic, self.engine.links
        if self.mode.exchange and microbatch == self._last:
            pattern = [gradient is not None for gradient in self._result]
            traffic.gradients_out[self.mode.pattern] = pattern
            links.control.tell(links.previous, _FRAME, payload=pattern)
        rows = zip(
            self._result,
            traffic.incoming[microbatch],
            traffic.gradients_out[self.mode.pattern],
        )
        links.gradients_out.send(
            [
                spec.zeros(self.engine.device) if gradient is None else gradient
                for gradient, spec, here in rows
                if here
            ]
        )

    def _hear_pattern(self) -> list[bool]:
        """Which of the values sent forward get a gradient: told once per pattern."""
        known, links = self.call.traffic.gradients_in, self.engine.links
        if self.mode.pattern not in known:
            _, _, known[self.mode.pattern] = links.control.hear(links.next)
        return known[self.mode.pattern]

    def _post(self, microbatch: int) -> Arrival:
        driver = self.engine.place.is_driver
        sent = (
            self.call.key.inputs[microbatch] if driver else self.call.traffic.outgoing[microbatch]
        )
        present = self.call.traffic.gradients_in[self.mode.pattern]
        return self.engine.links.gradients_in.post([s for s, here in zip(sent, present) if here])

    def _run(self, microbatch: int, gradients: Gradients) -> Gradients:
        keep = self.mode.keep
        saved = self.call.saved
        values, outputs = saved[microbatch] if keep else saved.pop(microbatch)
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
            torch.autograd.backward(roots, starts, retain_graph=keep)
            result = [value.grad for value in values]
            for value in wanted:
                value.grad = None
            return result
        found = torch.autograd.grad(roots, wanted, starts, retain_graph=keep, allow_unused=True)
        by_value = iter(found)
        return [next(by_value) if value.requires_grad else None for value in values]


class Ahead:
    """Receives that are posted one before they are needed, so that they overlap computation."""

    def __init__(
        self, steps: Sequence[Instruction], kind: Kind, post: Callable[[int], Arrival]
    ) -> None:
        self._todo = [step.microbatch for step in reversed(steps) if step.kind is kind]
        self._post = post
        self._posted: Arrival | None = None

    def take(self, microbatch: int) -> Values:
        """Wait for this micro-batch's tensors, after posting the receive of the next one's."""
        assert self._todo.pop() == microbatch
        arrival = self._posted or self._post(microbatch)
        self._posted = self._post(self._todo[-1]) if self._todo else None
        return arrival.wait()
