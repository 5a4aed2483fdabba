"""A network that has been cut, on its driver, which tells the workers what to run.

:class:`DrivenNetwork` numbers calls and their keys, tells the workers
(:mod:`lightning_hybrid.driver.commands`) and runs this rank's stages
(:mod:`lightning_hybrid.stage.engine`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import (
    CallKey,
    Precision,
    TensorSpec,
    signals_deferred,
)
from lightning_hybrid.comm.protocol import Backward, Commit, Forward, Free, Placement
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.split_batch import Numbers, Specialization
from lightning_hybrid.driver.step_calls import StepCalls
from lightning_hybrid.driver.streamed_calls import Batches, Stream
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


@dataclass(frozen=True, eq=False)
class PartsOfDriver:
    """What all networks of one driver work with.

    Attributes:
        commands: to the workers.
        weights: of all stages.
        gradients: likewise.
        calls: of the networks in this step.
        batches: that they are trained on.
        say: tells the user something, in one line.
    """

    commands: Commands
    weights: Weights
    gradients: ReplicaGradients
    calls: StepCalls
    batches: Batches
    say: Callable[[str], None]


class DrivenNetwork(StagedNetwork):
    """A network that has been cut, as its driver sees it.

    Args:
        number: of the network.
        name: dotted name in the LightningModule.
        module: the network.
        engine: this rank's stages at work.
        borrowed: names in the network of what this rank uses and another one owns.
        placement: where its stages are.
        parts: of the driver.
        continues: whether the code around a call draws random numbers of the same stream.

    Attributes:
        leaf: what autograd's graph has in the place of the parameters.
        stream: its calls that run ahead; ``None``: its schedule begins with none early.
    """

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        engine: Engine,
        borrowed: frozenset[str],
        placement: Placement,
        parts: PartsOfDriver,
        *,
        continues: bool,
    ) -> None:
        super().__init__(number, name, module, engine, borrowed)
        self.placement, self._continues = placement, continues
        self._commands, self._weights = parts.commands, parts.weights
        self._gradients, self._step_calls = parts.gradients, parts.calls
        self._specializations = 0
        self._numbers: dict[CallKey, int] = {}
        self._patterns: dict[tuple[Any, ...], int] = {}
        # the count is not the size of the table: a pass that fails is not in it,
        # but workers may know its number, which must not be given again
        self._count = self._pattern_count = 0
        # calls whose outputs were dropped; a finaliser may run anywhere, so it only notes them
        self._dropped: deque[int] = deque()
        # Tells "do parameters want gradients?": not a leaf (torch.autograd.grad refuses those),
        # and a view, which keeps nothing and so survives any number of backward passes.
        self.leaf = torch.zeros((), requires_grad=True)
        self._anchor = self.leaf.view_as(self.leaf)
        self._early_numbers: dict[CallKey, int] = {}  # of keys that workers have heard of
        self.stream: Stream | None = None
        if placement.schedule in STREAMED:
            self.stream = Stream(self, parts.commands, parts.batches, parts.say)

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
            # one stream for the whole batch: its state goes from stage to stage with the tensors
            slices = [[*slices[0], *random_state(self.engine.device)]]
        key = self._key(specialization.number, slices, numbers, grad, continues)
        self._commands.remote.flush()  # a change by hand interrupts what is under way
        launched = None if self.stream is None else self.stream.due(key, leaves)
        if launched is None:
            call, command = self.open_call(key)
            self._commands.tell(command)
            self._told(key.trainable)
        else:
            call, command = launched.call, launched.command
            self._launch(specialization, leaves)
        commits = launched is not None and bool(graph.written)
        if commits:
            # what a call that ran ahead has written to buffers is kept back until its turn: now
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
        self._numbers[key] = command.key
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
        # shapes of gradients travel with the first pass of a kind; later ones send numbers alone
        exchange = pattern is None
        if pattern is None:
            pattern = self._pattern_count
            self._pattern_count += 1
        if parameters:
            self._commands.remote.flush()
            # (after the flush: a gradient set by hand is with its owner before a pass adds to it)
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

    def open_call(self, key: CallKey, ahead: int = 0) -> tuple[Call, Forward]:
        """Open a call, and make the command that tells the workers of it.

        Args:
            key: of the call.
            ahead: how many batches before its turn it begins.
        """
        number = self._numbers.get(key)
        exchange = number is None
        if number is None and ahead:
            # several calls that begin early may be under way before the first of them is over
            number = self._early_numbers.get(key)
        if number is None:
            number = self.add_key(key)
        if exchange and ahead:
            self._early_numbers[key] = number
        # (with a new key no rank knows yet what later stages draw, so the state travels to be sure)
        uses_rng = exchange or key.continues or self.uses_rng(number)
        self._count += 1
        calls = self._step_calls
        draw = calls.draw_number_ahead(ahead) if ahead else calls.draw_number(key.grad)
        early = ahead > 0
        new_key = key if exchange else None
        command = Forward(
            self.number, self._count, draw, number, exchange, uses_rng, early, new_key
        )
        return self.open(command), command

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

        if self.stream is not None:
            self.stream.launch(specialization.graph, leaves, split)

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
        # all that decides what travels and how stages compute: equal keys send no headers again
        training, trainable = self.module.training, self.trainable()
        return CallKey(
            specialization, specs, numbers, grad, training, trainable, precision, continues
        )
