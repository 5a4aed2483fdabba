"""A call of a network that has been cut, on its driver: from the user's values to the pipeline.

A :class:`Specialization` is one captured graph of a network. The user's call of it is one node of
autograd (:class:`_NetworkCall`): its forward runs the pipeline and returns the outputs, its
backward sends the gradients back through the stages. :class:`DrivenNetwork` tells the workers
(:mod:`lightning_hybrid.runtime.commands`) and runs this rank's stages
(:mod:`lightning_hybrid.pipeline.engine`).
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch import (
    as_they_are,
    backward_reaches,
    forward_derivatives,
    graph_is_kept,
)
from lightning_hybrid.comm.call_key import CallKey, Precision
from lightning_hybrid.comm.protocol import Backward, Forward, Free
from lightning_hybrid.comm.signals import signals_deferred
from lightning_hybrid.comm.specs import TensorSpec
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network import NetworkGraph, StageCode
from lightning_hybrid.network.places import place_now
from lightning_hybrid.network.splitting import fits
from lightning_hybrid.pipeline.calls import Call, Gradients, Values
from lightning_hybrid.pipeline.engine import Engine
from lightning_hybrid.pipeline.random import random_state, set_random_state
from lightning_hybrid.pipeline.staged import StagedNetwork, tensors_of
from lightning_hybrid.runtime.commands import Commands
from lightning_hybrid.runtime.gradients import ReplicaGradients
from lightning_hybrid.runtime.step_calls import StepCalls
from lightning_hybrid.runtime.stream import Batches, Calls, EachInTurn, Stream
from lightning_hybrid.runtime.weights import Weights
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.tensors.kind import Kind
from lightning_hybrid.tensors.proxy import read_now

Numbers = tuple[tuple[int | float, ...], ...]
"""Per micro-batch, what the graph's numbers are."""


@dataclass(frozen=True)
class Placement:
    """Where the stages of a network are.

    Attributes:
        devices: ``pp_rank`` of each stage; the last one is 0, the driver.
        owned: of each stage, the names in the network of the tensors that belong to its rank.
        schedule: name of the schedule.
        split: numbers of the stages whose backward it splits.
    """

    devices: tuple[int, ...]
    owned: tuple[frozenset[str], ...]
    schedule: str
    split: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        codes: Sequence[StageCode],
        devices: Sequence[int],
        schedule: str,
        split: Sequence[int] = (),
    ) -> "Placement":
        """That of these stages on these devices."""
        owned = tuple([frozenset(code.owned) for code in codes])
        return cls(tuple(devices), owned, schedule, tuple(split))


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

    Attributes:
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
        leaf = torch.zeros((), requires_grad=True)
        self._anchor = leaf.view_as(leaf)
        self._early_numbers: dict[CallKey, int] = {}  # of keys that workers have heard of
        self.stream: Calls = EachInTurn()
        schedule = STREAMED.get(placement.schedule)
        if schedule is not None:
            self.stream = Stream(
                name or "self",
                schedule,
                placement.devices,
                engine,
                commands,
                batches,
                self._open_ahead,
                self.calls.pop,
            )

    def specialize(self, graph: NetworkGraph, parts: int) -> "Specialization":
        """A way to call the network; all ranks have their stages of it, made in the same order.

        Args:
            graph: of the call.
            parts: into how many micro-batches a batch may be split.
        """
        self._specializations += 1
        return Specialization(self, self._specializations - 1, graph, parts)

    @property
    def owned_names(self) -> frozenset[str]:
        """Names in the network of the tensors that stages own."""
        return frozenset[str]().union(*self.placement.owned)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that the network's stages own, here and on workers."""
        named = tensors_of(self.module)
        return [named[name] for name in self.owned_names]

    def anchor(self) -> Tensor | None:
        """What stands for the parameters in autograd's graph; ``None``: all are frozen."""
        with as_they_are():
            trained = any(parameter.requires_grad for parameter in self._parameters)
        return self._anchor if trained else None

    @signals_deferred
    def forward(
        self, specialization: "Specialization", leaves: Sequence[Tensor], *, grad: bool
    ) -> tuple[Call, list[Values]]:
        """Run the pipeline forward. Returns the call and, per micro-batch, the outputs."""
        while self._dropped:
            self._free(self._dropped.popleft())
        graph = specialization.graph
        self._weights.before_forward(grad=grad, written=graph.writes_parameters)
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
        try:
            with self._commands.workers.passing(self.engine):
                outputs = self.engine.forward(call, slices)
        except Exception:
            self._free(call.number)
            raise
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
        reduce = parameters and self._gradients.overlap()
        mode = Backward(
            self.number, call.number, pattern, exchange, parameters, keep, input_gradient, reduce
        )
        self._commands.tell(mode)
        if not keep:
            self.calls.pop(call.number, None)
        if parameters:
            self._gradients.note(self.number, averaged=reduce)
        if call.ahead:  # what it has written is for all to see from here on
            self._commands.remote.outdate(Kind.BUFFER)
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
        return call, number

    def _launch(self, specialization: "Specialization", leaves: Sequence[Tensor]) -> None:
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
            tuple(TensorSpec(tuple(t.shape), t.dtype, grad and t.requires_grad) for t in leaves)
            for leaves in slices
        )
        precision = Precision.current(self.engine.device)
        training, trainable = self.module.training, self.trainable()
        return CallKey(
            specialization, specs, numbers, grad, training, trainable, precision, continues
        )


class Specialization:
    """One captured graph of a network that has been cut; the user's code calls it.

    Args:
        network: that it is a graph of.
        number: of the graph among those of the network, the same on all ranks.
        graph: the graph.
        parts: into how many micro-batches a batch may be split.
    """

    def __init__(
        self, network: DrivenNetwork, number: int, graph: NetworkGraph, parts: int
    ) -> None:
        self.network, self.number, self.graph, self._parts = network, number, graph, parts
        self._splits: dict[tuple[torch.Size, ...], tuple[int, Numbers]] = {}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Call the network.

        Args:
            values: the arguments of the graph.

        Returns:
            What the graph returns.
        """
        graph, outputs = self.graph, None
        leaves = graph.bind(values)
        if torch.is_grad_enabled():
            anchor = self.network.anchor()
            if anchor is not None or any(leaf.requires_grad for leaf in leaves):
                outputs = _NetworkCall.apply(self, anchor, *leaves)  # type: ignore[no-untyped-call]
        if outputs is None:
            _, parts = self.network.forward(self, leaves, grad=False)
            outputs = _join(parts)
        if graph.written_leaves:
            self._write_back(leaves, outputs)
        numbers = graph.values_of_numbers(graph.sizes(leaves)) if graph.numbers else ()
        return graph.returned(outputs, numbers)

    def split(self, leaves: Sequence[Tensor]) -> tuple[list[list[Tensor]], Numbers]:
        """The inputs of each micro-batch, and its numbers."""
        shapes = tuple([leaf.shape for leaf in leaves])
        known = self._splits.get(shapes)
        if known is None:
            parts = self._parts
            if parts > 1 and not fits(self.graph, leaves, parts):
                parts = 1  # its code takes another way for parts of this size
            slices = self.graph.split(leaves, parts)
            sizes = [self.graph.sizes(part) for part in slices]
            known = parts, tuple([self.graph.values_of_numbers(each) for each in sizes])
            self._splits[shapes] = known
        parts, numbers = known
        return self.graph.split(leaves, parts), numbers

    def _write_back(self, leaves: Sequence[Tensor], outputs: Sequence[Any]) -> None:
        """What the network has changed in place, in tensors that are not its own."""
        found = dict(zip(self.graph.tensor_outputs, outputs))
        for leaf, tensor in zip(self.graph.leaves, leaves):
            if leaf in self.graph.written_leaves:
                with torch.no_grad():
                    tensor.copy_(found[leaf.node].detach())


class _NetworkCall(torch.autograd.Function):
    """A call of the network as one node of the graph of the user's code."""

    @staticmethod
    def forward(
        ctx: Any, specialization: Specialization, anchor: Tensor | None, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        network = specialization.network
        with forward_derivatives():
            call, parts = network.forward(specialization, leaves, grad=True)
        ctx.network, ctx.call = network, call
        ctx.trained = anchor is not None
        ctx.sizes = [[len(v) if isinstance(v, Tensor) and v.dim() else 1 for v in p] for p in parts]
        ctx.wanted = [leaf.requires_grad for leaf in leaves]
        ctx.split = [leaf.batched for leaf in specialization.graph.leaves]
        ctx.finaliser = weakref.finalize(ctx, network.drop, call.number)
        ctx.finaliser.atexit = False
        ctx.set_materialize_grads(False)
        outputs = _join(
            [[v.detach() if isinstance(v, Tensor) else v for v in part] for part in parts]
        )
        ctx.mark_non_differentiable(
            *(
                output
                for output, value in zip(outputs, parts[0])
                if isinstance(value, Tensor) and not value.requires_grad
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NetworkError(
                f"create_graph=True, in a backward or torch.autograd.grad ({place_now()}): "
                "gradients of gradients cannot pass through a network that is cut into stages. "
                "Compute the penalty with a network that is not cut "
                "(HybridGabraStrategy(network=...)), or train with strategy='ddp'."
            )
        network: DrivenNetwork = ctx.network
        keep = graph_is_kept()
        if ctx.call.number not in network.calls:
            raise RuntimeError(
                "Trying to backward through a call of the network a second time. Specify "
                "retain_graph=True in the first backward."
            )
        inputs = network.backward(
            ctx.call,
            _split_gradients(gradients, ctx.sizes),
            parameters=ctx.trained and backward_reaches(ctx, 0),
            keep=keep,
            input_gradient=any(ctx.wanted),
        )
        if not keep:
            ctx.finaliser.detach()
        return None, None, *_join_gradients(inputs, ctx.wanted, ctx.split)


def _join(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The outputs of the whole batch from those of its micro-batches."""
    if len(parts) == 1:
        return list(parts[0])
    # numbers are the same in all of them
    return [torch.cat(s) if isinstance(s[0], Tensor) else s[0] for s in zip(*parts)]


def _split_gradients(
    gradients: Sequence[Tensor | None], sizes: Sequence[Sequence[int]]
) -> list[Gradients]:
    """Per micro-batch, the gradients of the outputs.

    Args:
        gradients: of the outputs of the whole batch.
        sizes: per micro-batch, the first size of each output.
    """
    if len(sizes) == 1:
        return [list(gradients)]
    slices = [
        None if gradient is None else gradient.split([part[index] for part in sizes])
        for index, gradient in enumerate(gradients)
    ]
    return [[None if s is None else s[part] for s in slices] for part in range(len(sizes))]


def _join_gradients(
    inputs: Sequence[Gradients], wanted: Sequence[bool], split: Sequence[bool]
) -> Gradients:
    """The gradients of the inputs of the whole batch; of one that was passed whole, their sum."""
    joined: Gradients = []
    for index, (wants, is_split) in enumerate(zip(wanted, split)):
        slices = [part[index] for part in inputs if part] if wants else []
        present = [piece for piece in slices if piece is not None]
        if not present:
            joined.append(None)
        else:
            joined.append(torch.cat(present) if is_split else torch.stack(present).sum(0))
    return joined
