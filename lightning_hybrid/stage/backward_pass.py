"""A backward pass of one stage, instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_hybrid.comm import Arriving, GradientPattern
from lightning_hybrid.comm.protocol import Backward
from lightning_hybrid.schedules import INSIDE
from lightning_hybrid.stage.calls import Call, Gradients, SavedForward
from lightning_hybrid.stage.forward_pass import Pass
from lightning_hybrid.stage.random_numbers import generators_of_microbatch, set_random_state
from lightning_hybrid.stage.recomputation import Recipe, again
from lightning_hybrid.stage.split_backward import CANNOT_BE_SPLIT, WeightPart, input_part

if TYPE_CHECKING:
    from lightning_hybrid.stage.engine import Engine


class BackwardPass(Pass):
    """One backward pass of one stage; the engine calls a method for each instruction.

    Args:
        engine: runs the stages of this rank.
        index: index of the stage among this rank's stages.
        call: the call to go back through.
        mode: the command, which says what is to be computed.
        gradients: on the driver, for each micro-batch the gradients of the network's outputs; on a
            worker, not read. If backwards run inside of the call (`1f1b`), a dict by number of the
            micro-batch, to which the forward pass adds the gradients of each micro-batch.

    Attributes:
        inputs: on the driver, for each micro-batch the gradients of the network's inputs; an empty
            list until they are received, and on a worker.
    """

    def __init__(
        self,
        engine: Engine,
        index: int,
        call: Call,
        mode: Backward,
        gradients: Sequence[Gradients] | dict[int, Gradients],
    ) -> None:
        super().__init__(engine, index, call)
        self.mode = mode
        # if the rank has several stages, the backward of the first one comes last
        self._reduces_last = index == 0
        self.gradients = gradients
        self.inputs: list[Gradients] = [[] for _ in range(call.key.microbatches)]
        self._arrived: Gradients = []
        self._result: Gradients = []
        self._put_off: dict[int, WeightPart] = {}
        # (a call whose backwards follow it, as under fill-drain, has no instructions for weights)
        inside = engine.placement.schedule == INSIDE
        self._has_weights = not inside or bool(call.key.inside)
        # rings on which the stage before was told which of its outputs get gradients
        self._rings_told: set[int] = set()
        for links in self.own.links:
            links.previous.flush(engine.untaken(call))

    def expect_gradient(self, microbatch: int) -> None:
        self.expected[microbatch] = self._post(microbatch)

    def receive_gradient(self, microbatch: int) -> None:
        # An output without a gradient did not travel. Autograd must get None for it, as on one
        # device: zeros would make gradients (and optimizer states) where one device has none.
        present, arrived = self._taken(microbatch)
        # (inside of a call the other side may have failed, and then sends nothing)
        self._arrived = [self._shrunk(next(arrived, None)) if here else None for here in present]

    def receive_input_gradient(self, microbatch: int) -> None:
        present, arrived = self._taken(microbatch)
        self.inputs[microbatch] = [next(arrived) if here else None for here in present]

    def reduce(self, microbatch: int) -> None:
        # all gradients of the step are final, except those that the next instruction adds to
        if self.mode.reduce and self._reduces_last:
            if self.call.key.inside:
                self.engine.average_aside(self.call)
                return
            self.engine.averaging_group.arm(self.engine.done_before)
            links = self.own.links
            if links.ring(microbatch) not in links.rings:  # (this copy computes no micro-batch)
                self.engine.averaging_group.finish()

    def backward(self, microbatch: int) -> None:
        engine = self.engine
        # after an error nothing is computed; `send_gradient` fills in zeros
        self._result = [None] * len(self.traffic.incoming.get(microbatch, ()))
        if engine.failure is not None or microbatch not in self.saved:
            return
        # the driver has the last stage, and the gradients of its outputs from autograd
        gradients = self._gradients_of_outputs(microbatch) if self.own.is_last else self._arrived
        # (statistics: activation checkpointing runs layers again here)
        with (
            self.computing("backward", microbatch),
            engine.statistics(self.call.key),
            self._without_autocast(),
        ):
            self._result = self._run(microbatch, gradients)

    def weight(self, microbatch: int) -> None:
        """Add to ``weight.grad`` the gradients of weights that a split `backward` has put off.

        The schedules `zero_bubble` and `1f1b` have this instruction. Does nothing if the backward
        of this micro-batch was not split, or if this rank has failed.
        """
        part = self._put_off.pop(microbatch, None)
        if part is None or self.engine.failure is not None:
            return
        with self.computing("weight", microbatch), self._without_autocast():
            part.run(keep=self.mode.keep)

    def send_gradient(self, microbatch: int) -> None:
        traffic, links = self.traffic, self.links(microbatch)
        ring = self.own.links.ring(microbatch)
        if self.mode.exchange and ring not in self._rings_told:
            self._rings_told.add(ring)
            pattern = [gradient is not None for gradient in self._result]
            traffic.gradients_out[self.mode.pattern, ring] = pattern
            links.previous.send_word(GradientPattern(pattern))
        present = traffic.gradients_out[self.mode.pattern, ring]
        # zeros stand for what is missing: the other side waits for as many tensors as were agreed
        specs = list(compress(traffic.incoming.get(microbatch, ()), present))
        gradients = [
            spec.zeros(self.engine.device) if gradient is None else gradient
            for gradient, spec in zip(compress(self._result, present), specs)
        ]
        if self.call.key.inside:
            links.previous.flush(len(self.engine.placement.devices))
        links.previous.send(gradients, specs)

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """Context of a backward: if it runs inside of a call (`1f1b`), autocast is off in it.

        Autocast is possibly on in the call, and on one device no backward runs under autocast. For
        all other backwards the context does nothing.
        """
        if not self.call.key.inside:
            return nullcontext()
        return torch.autocast(self.call.key.precision.device_type, enabled=False)

    def _shrunk(self, gradient: Tensor | None) -> Tensor | None:
        """A gradient that has crossed a cut, times the engine's factor ``shrink``."""
        shrink = self.engine.shrink
        return gradient if shrink == 1 or gradient is None else gradient * shrink

    def _hear_pattern(self, microbatch: int) -> list[bool]:
        """Tell which of the values that this stage has sent get a gradient.

        The next stage says so in one message for each pattern and ring (see `Traffic`): the first
        time this waits for the message, later it looks the answer up. (On the driver's last stage
        the values are the network's inputs, and the next stage is stage 0.)

        Returns:
            For each value, in the order of sending, whether it gets a gradient.
        """
        known = self.traffic.gradients_in
        place = self.mode.pattern, self.own.links.ring(microbatch)
        if place not in known:
            known[place] = self.links(microbatch).next.receive_word(GradientPattern).present
        return known[place]

    def _taken(self, microbatch: int) -> tuple[list[bool], Iterator[Tensor]]:
        """Wait for the gradients of the values that this stage has sent, and return them.

        The receive is begun here if `expect_gradient` has not done so.

        Returns:
            A pair: for each value, in the order of sending, whether it gets a gradient; and an
            iterator over the gradients, in the same order, which skips values without one.
        """
        if microbatch not in self.expected:  # (the sender is a stage of this rank)
            self.expect_gradient(microbatch)
        arriving = self.expected.pop(microbatch)
        return self._hear_pattern(microbatch), iter(arriving.wait() if arriving else ())

    def _post(self, microbatch: int) -> Arriving:
        """Begin to receive the gradients of what this stage has sent for a micro-batch."""
        inputs, outgoing = self.call.key.inputs, self.traffic.outgoing
        sent = inputs[microbatch] if self.own.is_last else outgoing.get(microbatch, ())
        present = self._hear_pattern(microbatch)
        return self.links(microbatch).next.post(list(compress(sent, present)))

    def _gradients_of_outputs(self, microbatch: int) -> Gradients:
        found = self.gradients
        # (inside of a call each micro-batch's gradients are taken once, and freed)
        return found.pop(microbatch) if isinstance(found, dict) else found[microbatch]

    def _run(self, microbatch: int, gradients: Gradients) -> Gradients:
        # 1. What the forward has left: its activations, or how to make them again. Popped, so that
        #    each micro-batch's memory is free as soon as it went back.
        keep = self.mode.keep
        saved = self.saved[microbatch] if keep else self.saved.pop(microbatch)
        graph = self._again(microbatch, saved) if isinstance(saved, Recipe) else saved
        # 2. Where to begin and what is wanted. Outputs without a gradient take no part.
        pairs = [
            (root, gradient)
            for root, gradient in zip(graph.roots, gradients)
            if gradient is not None and root is not None
        ]
        wanted = [value for value in graph.values if value.requires_grad]
        if not pairs or not (self.mode.parameters or wanted):
            return [None] * len(graph.values)
        # 3. Back, and the gradients in the order of what had arrived.
        roots, starts = [root for root, _ in pairs], [start for _, start in pairs]
        found = iter(self._gradients(microbatch, roots, starts, wanted))
        return [next(found) if value.requires_grad else None for value in graph.values]

    def _gradients(
        self, microbatch: int, roots: list[GradientEdge], starts: list[Tensor], wanted: list[Tensor]
    ) -> Sequence[Tensor | None]:
        """Go back through the stage, and return the gradients of ``wanted``.

        The gradients of weights are added to ``weight.grad``; if the backward is split, they are
        put off until `weight`. Under ``torch.autograd.grad`` (``mode.parameters`` is false) weights
        get none.

        Args:
            microbatch: number of the micro-batch.
            roots: edges of the stage's outputs in autograd's graph.
            starts: the gradient of each of these outputs.
            wanted: the inputs of the stage that require a gradient.

        Returns:
            For each of ``wanted`` its gradient; ``None``: no output depends on it.
        """
        keep = self.mode.keep
        # under the user's `torch.autograd.grad` of inputs weights must not get gradients
        if not self.mode.parameters:
            return torch.autograd.grad(roots, wanted, starts, retain_graph=keep, allow_unused=True)
        # (not with weights frozen since the forward, which only an ordinary backward leaves out)
        splits = self.own.splits and self._has_weights
        if splits and wanted and self.mode.trainable is None:
            parts = input_part(roots, starts, wanted)
            if parts is not None:
                found, self._put_off[microbatch] = parts
                return found
            self.own.go_back_in_one(CANNOT_BE_SPLIT)
        # `backward` and not `grad`: it adds to ``weight.grad`` and calls the hooks of weights, by
        # which the averaging of gradients knows that a gradient is final
        torch.autograd.backward(roots, starts, retain_graph=keep)
        gradients = [value.grad for value in wanted]
        # the values that arrived are leaves too: if the graph is kept, the next backward adds
        for value in wanted:
            value.grad = None
        return gradients

    def _again(self, microbatch: int, recipe: Recipe) -> SavedForward:
        """Run a forward again whose activations were not kept; return its graph for the backward.

        Called right before the backward, if activations are recomputed (``Placement.recompute``,
        or ``weights="recompute"`` of a delayed schedule). The forward draws the same random numbers
        as before, and uses the current weights.
        """
        engine, key = self.engine, self.call.key
        with ExitStack() as stack:
            stack.enter_context(key.precision.applied())
            if recipe.states:
                stack.enter_context(generators_of_microbatch(None, engine.device))
                set_random_state(recipe.states, engine.device)
            stage = engine.stage_for(self.own, key)
            aside = self.call.aside[self.index] if self.call.aside else {}
            return SavedForward.of(*again(stage, recipe, key.numbers[microbatch], aside))
