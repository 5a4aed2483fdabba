"""A forward pass of one stage, instruction by instruction.

In the first call with a `CallKey` it sends and receives headers with the shapes of activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid._torch.autograd import own_saved_tensors
from lightning_hybrid.comm import Arriving, Header, StageLinks, TensorSpec
from lightning_hybrid.graph import Stage
from lightning_hybrid.schedules import InstructionKind
from lightning_hybrid.stage.calls import Call, Ends, Gradients, SavedForward, Values
from lightning_hybrid.stage.random_numbers import (
    generators_of_microbatch,
    microbatch_seed,
    random_state,
    set_random_state,
    state_specs,
)
from lightning_hybrid.stage.recomputation import forward

if TYPE_CHECKING:
    from lightning_hybrid.stage.engine import Engine


class Pass:
    """Base of a pass of one stage. A subclass has a method for each kind of instruction.

    The method has the name of its :class:`InstructionKind`, and takes the number of the
    micro-batch.

    Args:
        engine: runs the stages of this rank.
        index: index of the stage among this rank's stages.
        call: the call of the network.

    Attributes:
        error: the last error that the stage has raised in this pass; ``None``: none.
        expected: by micro-batch, the message whose receive has begun; ``None``: the stage that
            would send it has failed, and sends no message.
    """

    def __init__(self, engine: Engine, index: int, call: Call) -> None:
        self.engine = engine
        self.own = engine.owned[index]
        self.call = call
        self.index = index
        self.traffic = call.traffic[index]
        self.saved = call.saved[index]
        self.error: Exception | None = None
        self.expected: dict[int, Arriving | None] = {}

    @contextmanager
    def computing(self, what: str, microbatch: int) -> Iterator[None]:
        """Context of a computation: its time is recorded, and an error is noted, not raised.

        Args:
            what: ``"forward"``, ``"backward"`` or ``"weight"``, for the trace.
            microbatch: number of the micro-batch.
        """
        # (other ranks wait for what this list still has to send)
        try:
            trace = self.engine.trace
            with trace.span(f"{self.own.label}{what} {microbatch}") if trace.on else nullcontext():
                yield
        except Exception as error:
            self.error = error
            self.engine.fail(error, self.own.number)

    def links(self, microbatch: int) -> StageLinks:
        """Return the stage's links to its neighbours for a micro-batch that this rank computes."""
        return self.own.links.at(microbatch)

    def do(self, kind: InstructionKind, microbatch: int) -> None:
        """Carry out an instruction: call the method that has the name of its kind."""
        getattr(self, kind.value)(microbatch)


class ForwardPass(Pass):
    """One forward pass of one stage; the engine calls a method for each instruction.

    Args:
        engine: runs the stages of this rank.
        index: index of the stage among this rank's stages.
        call: the call of the network.
        inputs: on the driver, for each micro-batch the values for stage 0; on a worker, not read.
        ends: on the driver, if backwards run inside of the call (`1f1b`): makes the gradients of a
            micro-batch's outputs.

    Attributes:
        outputs: outputs of each micro-batch, in the order in which they ran.
        gradients: by number of the micro-batch, the gradients of its outputs that ``ends`` has
            returned; the backward pass takes them out.
    """

    def __init__(
        self,
        engine: Engine,
        index: int,
        call: Call,
        inputs: Sequence[Values],
        ends: Ends | None = None,
    ) -> None:
        super().__init__(engine, index, call)
        self.inputs = inputs
        self._ends = ends
        self.outputs: list[Values] = []
        self.gradients: dict[int, Gradients] = {}  # of the outputs, where a backward follows
        # how many messages may be unreceived by a neighbour, if backwards run inside of the call
        self._most = len(engine.placement.devices) if call.key.inside else None
        self._values: Values | None = None
        self._result: Values | None = None
        self._first = self.own.number == 0
        # shapes and types of the generators' state as it travels; empty if it does not
        self._states = state_specs(engine.device) if call.uses_rng else ()
        self._takes_states = call.uses_rng and (not self._first or call.key.continues_generators)
        # rings on which the stage before has failed, and rings on which the next stage knows of it
        self._silent: set[int] = set()
        self._told_failure: set[int] = set()
        # frees the activations and the gradients that earlier passes have sent
        for links in self.own.links:
            links.next.flush(engine.untaken(call))
            links.previous.flush(engine.untaken(call))
        if call.exchange:
            self.traffic.outgoing = {}
            self.traffic.incoming = {}
            if self._first:
                self.traffic.incoming |= enumerate(map(list, call.key.inputs))

    def send_input(self, microbatch: int) -> None:
        if not self.call.ahead:  # (else the driver has sent them already)
            specs = self.call.key.inputs[microbatch]
            self._send(microbatch, self.inputs[microbatch], specs)

    def expect_activation(self, microbatch: int) -> None:
        self.expected[microbatch] = self._post(microbatch)

    def receive_activation(self, microbatch: int) -> None:
        if microbatch not in self.expected:  # (the sender is a stage of this rank)
            self.expect_activation(microbatch)
        arriving = self.expected.pop(microbatch)
        self._values = None if arriving is None else arriving.wait()

    def forward(self, microbatch: int) -> None:
        self._result = None
        # after an error zeros arrive: nothing is computed, and zeros are sent on
        if self._values is None or self.engine.failure is not None:
            return
        with self.computing("forward", microbatch):
            self._result = self._run(microbatch, self._values)
            if self._ends is not None and self.own.is_last:
                self._result, self.gradients[microbatch] = self._ends(microbatch, self._result)
            self.outputs.append(self._result)

    def send_activation(self, microbatch: int) -> None:
        # the other side has posted a receive, or will: after an error it gets an empty header in
        # the first call of a key, and in later ones tensors of the shapes that it waits for
        if self.call.exchange:
            self._send_header(microbatch)
            if self._result is None:
                return
        specs = [*self.traffic.outgoing[microbatch], *self._states]
        values = self._result
        if values is None:
            values = [spec.zeros(self.engine.device) for spec in specs]
        self._send(microbatch, values, specs)

    def _send(self, microbatch: int, values: Values, specs: Sequence[TensorSpec]) -> None:
        link = self.links(microbatch).next
        if self._most is not None:
            link.flush(self._most)  # (the peer has received more than that, so this does not wait)
        link.send(values, specs)

    def _post(self, microbatch: int) -> Arriving | None:
        if self.call.exchange and not self._first and not self._hears_header(microbatch):
            return None
        specs = self.traffic.incoming[microbatch]
        states = () if self._first else self._states
        return self.links(microbatch).previous.post([*specs, *states])

    def _hears_header(self, microbatch: int) -> bool:
        """Receive the header of a micro-batch, and keep the specs that it has.

        Returns:
            Whether activations follow. A stage that has failed sends one empty header on a ring,
            and nothing more: for later micro-batches this returns false without a receive.
        """
        ring = self.own.links.ring(microbatch)
        if ring in self._silent:
            return False
        header = self.links(microbatch).previous.receive_word(Header)
        if header.specs is None:
            self._silent.add(ring)
            return False
        self.traffic.incoming[microbatch] = header.specs
        self.traffic.uses_rng |= header.uses_rng
        return True

    def _send_header(self, microbatch: int) -> None:
        """Send the specs of the values that follow; after an error an empty header on each ring."""
        if self._result is not None:
            crossing = self._result[: len(self._result) - len(self._states)]
            specs = [TensorSpec.of(value) for value in crossing]
            self.traffic.outgoing[microbatch] = specs
            self.links(microbatch).next.send_word(Header(specs, self.traffic.uses_rng))
        elif (ring := self.own.links.ring(microbatch)) not in self._told_failure:
            self._told_failure.add(ring)  # after the first empty header nobody listens for more
            self.links(microbatch).next.send_word(Header())

    def _run(self, microbatch: int, values: Values) -> Values:
        engine, call = self.engine, self.call
        with ExitStack() as stack:
            # 1. The micro-batch's own random generators, where the stage before has left them.
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
            # 2. The layers.
            stage = engine.stage_for(self.own, call.key)
            with engine.noting(stage, microbatch):
                outputs = self._compute(stage, microbatch, values, before)
            if not call.uses_rng:
                return outputs
            # 3. The generators' state travels on with the activations. A state that has changed
            #    tells that a layer has drawn, even if the graph does not show it. If no layer
            #    draws, the state does not travel in later calls with this key.
            after = random_state(engine.device)
            self.traffic.uses_rng |= not all(torch.equal(a, b) for a, b in zip(before, after))
            if not self.own.is_last:
                return [*outputs, *after]
            call.states = after
            return outputs

    def _compute(self, stage: Stage, microbatch: int, values: Values, states: Values) -> Values:
        numbers = self.call.key.numbers[microbatch]
        # a) no backward follows
        if not self.call.key.grad:
            with self.engine.statistics(self.call.key):
                return self._called(stage, values, numbers)
        self.engine.refuse_sparse()
        # Each stage is a graph of autograd by itself, whose leaves are the values that have
        # arrived. A value requires a gradient here if it does on the rank that has sent it.
        specs = self.traffic.incoming[microbatch]
        values = [v.detach().requires_grad_(s.requires_grad) for v, s in zip(values, specs)]
        # b) before its turn: with buffers and weights of its own
        if self.call.ahead and not self.own.is_last:
            assert self.own.early is not None  # (only a streamed schedule runs ahead)
            outputs, recipe = self.own.early.forward(
                self.call.number, stage, values, numbers, states
            )
            self.saved[microbatch] = recipe or SavedForward.of(values, outputs)
            return outputs
        with self.engine.statistics(self.call.key):
            # c) to be run again in the backward
            if self.engine.recompute:
                outputs, self.saved[microbatch] = forward(stage, values, numbers, states)
                return outputs
            # d) in its turn, activations kept
            with torch.enable_grad(), own_saved_tensors():
                outputs = self._called(stage, values, numbers)
        if self.own.early is not None:
            self.own.early.refuse_functions(stage, outputs)
        self.saved[microbatch] = SavedForward.of(values, outputs)
        return outputs

    def _called(self, stage: Stage, values: Values, numbers: Sequence[Any]) -> Values:
        call = self.call
        if not (call.aside or call.again):
            return stage(values, numbers)
        aside = call.aside[self.index] if call.aside else {}
        changed = stage.changed() if call.again else {}
        kept = {name: value.clone() for name, value in changed.items()}
        return stage.run_with([*(stage.taken() | aside | kept).values()], values, numbers)
