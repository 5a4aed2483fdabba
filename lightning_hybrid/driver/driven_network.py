"""A network that has been cut, on its driver, which tells the workers what to run.

:class:`DrivenNetwork` numbers calls and their keys, tells the workers
(:mod:`lightning_hybrid.driver.commands`) and runs this rank's stages
(:mod:`lightning_hybrid.stage.engine`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import (
    CallKey,
    Precision,
    TensorSpec,
    copies_of,
    signals_deferred,
)
from lightning_hybrid.comm.protocol import Backward, Commit, Forward, Free, Placement
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.split_batch import Numbers, Specialization
from lightning_hybrid.driver.step_calls import StepCalls
from lightning_hybrid.driver.streamed_calls import Batches, Calls, Stream
from lightning_hybrid.driver.weights import Weights
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.remote import read_now
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import (
    Call,
    Engine,
    Gradients,
    StagedNetwork,
    Values,
    random_state,
    set_random_state,
    tensors_of,
)


class DrivenNetwork(StagedNetwork):
    """A network that has been cut, as its driver sees it.

    Args:
        number: of the network.
        name: dotted name in the LightningModule.
        module: the network.
        engine: this rank's stages at work.
        borrowed: names in the network of what this rank uses and another one owns.
        placement: where its stages are.
        continues: whether the code around a call draws random numbers of the same stream.
        commands: to the workers.
        weights: of all stages.
        gradients: likewise.
        calls: of the networks in this step.
        batches: that it is trained on.
        say: tells the user something, in one line.

    Attributes:
        leaf: what autograd's graph has in the place of the parameters.
        stream: its calls that run ahead.
    """

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        engine: Engine,
        borrowed: frozenset[str],
        placement: Placement,
        *,
        continues: bool,
        commands: Commands,
        weights: Weights,
        gradients: ReplicaGradients,
        calls: StepCalls,
        batches: Batches,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(number, name, module, engine, borrowed)
        self.placement, self._continues = placement, continues
        self._commands, self._weights, self._gradients = commands, weights, gradients
        self._step_calls = calls
        self._specializations = 0
        self._numbers: dict[CallKey, int] = {}
        self._patterns: dict[tuple[Any, ...], int] = {}
        self._count = self._pattern_count = 0
        # calls whose outputs were dropped; a finaliser may run anywhere, so it only notes them
        self._dropped: deque[int] = deque()
        # Tells "do parameters want gradients?": not a leaf (torch.autograd.grad refuses those),
        # and a view, which keeps nothing and so survives any number of backward passes.
        self.leaf = torch.zeros((), requires_grad=True)
        self._anchor = self.leaf.view_as(self.leaf)
        self._early_numbers: dict[CallKey, int] = {}  # of keys that workers have heard of
        self.stream = Calls()
        schedule = STREAMED.get(placement.schedule)
        if schedule is not None:
            self.stream = Stream(
                name or "self",
                schedule,
                [device for copies in placement.devices for device in copies_of(copies)],
                engine,
                commands,
                batches,
                self._open_ahead,
                self.calls.pop,
                say,
            )

    def specialize(self, graph: NetworkGraph, parts: int) -> Specialization:
        """Take in a graph; all ranks have their stages of it, made in the same order.

        Args:
            graph: of the call.
            parts: into how many micro-batches a batch may be split.
        """
        self._specializations += 1
        return Specialization(self._specializations - 1, graph, parts)

    @property
    def owned_names(self) -> frozenset[str]:
        """Names in the network of the tensors that stages own."""
        return frozenset[str]().union(*self.placement.owned)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that the network's stages own, here and on workers."""
        named = tensors_of(self.module)
        return [named[name] for name in self.owned_names]

    def weights(self) -> list[nn.Parameter]:
        """The parameters that the network's stages own, here and on workers."""
        return [tensor for tensor in self.tensors() if isinstance(tensor, nn.Parameter)]

    def anchor(self) -> Tensor | None:
        """What stands for the parameters in autograd's graph; ``None``: all are frozen."""
        with as_they_are():
            trained = any(parameter.requires_grad for parameter in self._parameters)
        return self._anchor if trained else None

    @signals_deferred
    def forward(
        self, specialization: Specialization, leaves: Sequence[Tensor], *, grad: bool
    ) -> tuple[Call, list[Values]]:
        """Run the pipeline forward. Returns the call and, per micro-batch, the outputs."""
        while self._dropped:
            self._free(self._dropped.popleft())
        graph = specialization.graph
        self._weights.before_forward(graph, grad=grad)
        # in the middle of a pass no worker could answer what its buffer is now
        leaves = [read_now(leaf) for leaf in leaves]
        slices, numbers = specialization.split(leaves)
        continues = self._continues and graph.uses_rng
        if continues:
            slices = [[*slices[0], *random_state(self.engine.device)]]
        key = self._key(specialization.number, slices, numbers, grad, continues)
        self._commands.remote.flush()  # a change by hand interrupts what is under way
        launched = self.stream.due(key, leaves)
        if launched is None:
            call, key_number = self._begin(key)
        else:
            call, key_number = launched.call, launched.command.key
            self._launch(specialization, leaves)
        commits = launched is not None and bool(graph.written)
        if commits:
            self._commands.tell(Commit(self.number, call.number))
        try:
            with self._commands.workers.passing(self.engine):
                outputs = self.engine.forward(call, slices)
        except Exception:
            self._free(call.number)
            raise
        finally:
            if commits:
                self.engine.commit(call)
        if continues:
            set_random_state(call.states, self.engine.device)
        # known from here on: a call that fails half-way has taught nobody its shapes
        self._numbers[key] = key_number
        if grad:
            self._step_calls.note()
            if launched is None:
                self._launch(specialization, leaves)
        return call, outputs

    @signals_deferred
    def backward(
        self,
        call: Call,
        gradients: Sequence[Gradients],
        *,
        parameters: bool,
        keep: bool,
        input_gradient: bool,
    ) -> list[Gradients]:
        """Run the pipeline backward. Returns, per micro-batch, the gradients of the inputs."""
        present = tuple(gradient is not None for gradient in gradients[0])
        pattern_key = call.key, present, parameters, input_gradient
        pattern = self._patterns.get(pattern_key)
        exchange = pattern is None
        if pattern is None:
            pattern = self._pattern_count
            self._pattern_count += 1
        if parameters:
            self._commands.remote.flush()
            self._commands.remote.gradients.refuse_parts()
        reduce = parameters and not self.weight_hooks.held and self._gradients.overlap()
        was, now = call.key.trainable, self.trainable()
        # (what was frozen in the forward is not part of its graph)
        trainable = None if now == was else tuple([a and b for a, b in zip(was, now)])
        mode = Backward(
            *(self.number, call.number, pattern, exchange, parameters, keep, input_gradient),
            *(reduce, trainable),
        )
        self._commands.tell(mode)
        self._told(trainable or was)
        if not keep:
            self.calls.pop(call.number, None)
        if parameters:
            self._gradients.note(self.number, averaged=reduce)
        with self._commands.workers.passing(self.engine):
            found = self.engine.backward(call, mode, gradients)
        # known from here on: a pass that fails has told that nothing gets a gradient
        self._patterns[pattern_key] = pattern
        return found

    def drop(self, number: int) -> None:
        """The output of a call was dropped without a backward."""
        self._dropped.append(number)

    def _begin(self, key: CallKey) -> tuple[Call, int]:
        """Open a call and tell the workers. Returns it, and the number of its key."""
        known = self._numbers.get(key)
        exchange = known is None
        number = self.add_key(key) if known is None else known
        uses_rng = exchange or key.continues or self.uses_rng(number)
        self._count += 1
        draw = self._step_calls.draw_number(key.grad)
        call = self.open(self._count, draw, number, exchange=exchange, uses_rng=uses_rng)
        new_key = key if exchange else None
        self._commands.tell(
            Forward(self.number, call.number, draw, number, exchange, uses_rng, False, new_key)
        )
        self._told(key.trainable)
        return call, number

    def _told(self, trainable: tuple[bool, ...]) -> None:
        """Workers take these flags: where this rank has a copy, it sums the same gradients."""
        if self.placement.collects:
            flags = zip(self._parameters, trainable)
            self.engine.replica_group.trainable = {p for p, trains in flags if trains}

    def _launch(self, specialization: Specialization, leaves: Sequence[Tensor]) -> None:
        """Launch calls of later batches, like one that was just called."""

        def split(others: Sequence[Tensor]) -> tuple[CallKey, list[Values]]:
            slices, numbers = specialization.split(others)
            return self._key(specialization.number, slices, numbers, True, False), slices

        self.stream.launch(specialization.graph, leaves, split)

    def _open_ahead(self, key: CallKey, count: int) -> tuple[Call, Forward]:
        """Open a call for the batch that is so many ahead, and the command that tells of it."""
        known = self._numbers.get(key)
        exchange, number = known is None, known
        if number is None:
            if key not in self._early_numbers:
                self._early_numbers[key] = self.add_key(key)
            number = self._early_numbers[key]
        uses_rng = exchange or self.uses_rng(number)
        self._count += 1
        draw = self._step_calls.draw_number_ahead(count)
        call = self.open(
            self._count, draw, number, exchange=exchange, uses_rng=uses_rng, ahead=True
        )
        new_key = key if exchange else None
        return call, Forward(
            self.number, call.number, draw, number, exchange, uses_rng, True, new_key
        )

    def _free(self, number: int) -> None:
        if self.calls.pop(number, None) is not None:
            self._commands.tell(Free(self.number, number))

    def _key(
        self,
        specialization: int,
        slices: Sequence[Sequence[Tensor]],
        numbers: Numbers,
        grad: bool,
        continues: bool,
    ) -> CallKey:
        specs = tuple(
            tuple(TensorSpec.of(tensor, gradient=grad) for tensor in leaves) for leaves in slices
        )
        precision = Precision.current(self.engine.device)
        training, trainable = self.module.training, self.trainable()
        return CallKey(
            specialization, specs, numbers, grad, training, trainable, precision, continues
        )
