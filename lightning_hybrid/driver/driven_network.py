"""A network that has been cut, on the driver: it runs calls forward and backward on all ranks.

:class:`DrivenNetwork` numbers calls and their keys, sends the workers commands
(:mod:`lightning_hybrid.driver.commands`) and runs this rank's stages
(:mod:`lightning_hybrid.stage.engine`). With ``rng="device"``, and if the network is several graphs,
it takes the states of torch's generators into a call and puts them back after it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are
from lightning_hybrid.comm import (
    CallKey,
    CallPrecision,
    Inside,
    TensorSpec,
    signals_deferred,
)
from lightning_hybrid.comm.protocol import Backward, CommitEarlyForward, Forward, FreeCall
from lightning_hybrid.driver.commands import Commands
from lightning_hybrid.driver.microbatches import NumbersOfMicrobatches, Specialization
from lightning_hybrid.driver.seed_numbers import StepCalls
from lightning_hybrid.driver.streamed_calls import Batches, EarlyCalls
from lightning_hybrid.driver.tied_weights import Borrowing
from lightning_hybrid.driver.weight_hooks import WeightHooks
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.graph import NetworkGraph
from lightning_hybrid.remote import RemoteKind, read_now
from lightning_hybrid.schedules import INSIDE, STREAMED
from lightning_hybrid.stage import (
    Call,
    Ends,
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
    """The parts of one driver that its networks use.

    Attributes:
        commands: sends commands to the workers.
        borrowing: brings every rank the values of tied weights.
        gradients: averages gradients over the replicas.
        calls: numbers the calls of networks in the current step.
        batches: the training batches.
        scaled: multiplies a number on the driver's device by the factor of loss scaling, by which
            losses are multiplied before a backward.
    """

    commands: Commands
    borrowing: Borrowing
    gradients: ReplicaGradients
    calls: StepCalls
    batches: Batches
    scaled: Callable[[Tensor], Tensor]


class DrivenNetwork(StagedNetwork):
    """A network that has been cut, on the driver.

    Args:
        number: number of the network.
        name: dotted name of the network in the LightningModule.
        module: the network.
        engine: runs this rank's stages.
        parts: the parts of the driver that it uses.
        continues_generators: whether the network draws its random numbers from the generators of
            the code around a call.

    Attributes:
        placement: which ranks have which stages, and the schedule.
        weight_hooks: the user's hooks on the gradients of weights.
        leaf: a tensor that stands for the parameters in autograd's graph.
        stream: its calls that were launched early; ``None``: its schedule launches none.
        age: how often weights have possibly changed. A call is not run again at another age.
        scaled: see :class:`PartsOfDriver`.
    """

    def __init__(
        self,
        number: int,
        name: str,
        module: nn.Module,
        engine: Engine,
        parts: PartsOfDriver,
        *,
        continues_generators: bool,
    ) -> None:
        super().__init__(number, name, module, engine)
        self.placement = engine.placement
        self.weight_hooks = WeightHooks(module)
        self._continues_generators = continues_generators
        self._has_copy = self.placement.collects
        self._commands = parts.commands
        self._borrowing = parts.borrowing
        self._gradients = parts.gradients
        self._step_calls = parts.calls
        self._graphs: list[NetworkGraph] = []
        self._numbers: dict[CallKey, int] = {}
        self._patterns: dict[tuple[Any, ...], int] = {}
        # (not the size of the table: the number of a pass that has failed is not in the table, but
        # must not be used again, since workers may know it)
        self._count = self._pattern_count = 0
        # calls whose outputs were dropped (only noted, since a finaliser may run at any moment)
        self._dropped: deque[int] = deque()
        # The anchor is an input of each call, by which autograd knows whether parameters need
        # gradients. It is no leaf, since torch.autograd.grad refuses those, but a view of one: a
        # view saves nothing and so survives any number of backward passes.
        self.leaf = torch.zeros((), requires_grad=True)
        self._anchor = self.leaf.view_as(self.leaf)
        self.age = 0
        self.scaled = parts.scaled
        self._early_numbers: dict[CallKey, int] = {}  # numbers of new keys of launched calls
        self.stream: EarlyCalls | None = None
        if self.placement.schedule in STREAMED:
            self.stream = EarlyCalls(self, parts.commands, parts.batches)

    def specialize(self, graph: NetworkGraph, parts: int) -> Specialization:
        """Register a captured graph of the network, after all ranks have got their stages of it.

        Args:
            graph: the graph; all ranks get the graphs of a network in the same order.
            parts: into how many micro-batches a batch may be split.

        Returns:
            The graph with its number, for :meth:`forward`.
        """
        self._graphs.append(graph)
        return Specialization(len(self._graphs) - 1, graph, parts)

    @property
    def owned_names(self) -> frozenset[str]:
        """Names in the network of the tensors that stages own."""
        return frozenset[str]().union(*self.placement.owned)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that stages own, here and on workers, in no fixed order."""
        named = tensors_of(self.module)
        return [named[name] for name in self.owned_names]

    def weights(self) -> list[nn.Parameter]:
        """The parameters that the network's stages own, here and on workers, in no fixed order."""
        return [tensor for tensor in self.tensors() if isinstance(tensor, nn.Parameter)]

    def trained(self) -> Iterator[nn.Parameter]:
        """The parameters that required a gradient in at least one differentiable call so far.

        No optimizer step has changed the others.
        """
        flags = {key.trainable for key in self._numbers if key.grad}
        return (parameter for parameter, *each in zip(self._parameters, *flags) if any(each))

    def anchor(self) -> Tensor | None:
        """The tensor that a call takes as an input for autograd, in the place of all parameters.

        ``None``: all parameters are frozen.
        """
        with as_they_are():
            trained = any(parameter.requires_grad for parameter in self._parameters)
        return self._anchor if trained else None

    @signals_deferred
    def forward(
        self,
        specialization: Specialization,
        leaves: Sequence[Tensor],
        *,
        grad: bool,
        ends: Ends | None = None,
        again: Call | None = None,
    ) -> tuple[Call, list[Values]]:
        """Run the pipeline forward on all ranks of the replica.

        Under a streamed schedule, a call that was launched early is only completed here, and the
        calls of later batches are launched.

        Args:
            specialization: the captured graph that is called.
            leaves: the inputs of the graph, for the whole batch.
            grad: whether a backward may follow.
            ends: called with the number and outputs of each micro-batch, if backwards run inside of
                the call: gives the outputs that are kept, and the gradients of all.
            again: the same call, if it has run before; it draws the same random numbers.

        Returns:
            The call, for :meth:`backward`; and per micro-batch the outputs of the graph, or with
            ``ends`` those that it keeps.

        Raises:
            Exception: a stage has failed.
        """
        while self._dropped:
            self._free(self._dropped.popleft())
        graph = specialization.graph
        self._refresh(graph, grad=grad)
        # (inputs that are proxies are read now: in the middle of a pass no worker could answer)
        leaves = [read_now(leaf) for leaf in leaves]
        slices, numbers = specialization.split(leaves)
        continues_generators = self._continues_generators and graph.uses_rng
        if continues_generators:
            # the generators' states go from stage to stage with the tensors, of one micro-batch
            slices = [[*slices[0], *random_state(self.engine.device)]]
        inside = _inside(graph, ends)
        key = self._key(specialization.number, slices, numbers, grad, continues_generators, inside)
        launched = None if self.stream is None else self.stream.due(key, leaves)
        if launched is None:
            averages = grad and again is None and self._averages_inside()
            call, command = self.open_call(key, again=again, averages=averages)
            self._commands.tell(command)
            self._average_what_workers_do(key.trainable)
        else:
            call, command = launched.call, launched.command
            self._launch(specialization, leaves)
        commits = launched is not None and bool(graph.written)
        if commits:
            # now is the turn of a call that ran ahead: put what it has written into the buffers
            self._commands.tell(CommitEarlyForward(self.number, call.number))
        try:
            with self._commands.workers.passing(self.engine):
                outputs = self.engine.forward(call, slices, ends)
        except Exception:
            self._free(call.number)
            raise
        finally:
            if commits:
                self.engine.commit(call)
        if continues_generators:
            set_random_state(call.states, self.engine.device)
        # (only after a call that went well: its stages know the shapes by now)
        self._numbers[key] = command.key
        if grad:
            self._step_calls.count += again is None
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
        factor: Tensor | None = None,
    ) -> list[Gradients]:
        """Run the pipeline backward on all ranks of the replica.

        Each rank adds the gradients of its parameters to ``parameter.grad``.

        Args:
            call: the call, as :meth:`forward` has returned it.
            gradients: per micro-batch, the gradients of the outputs; ``None``: an output has none.
            parameters: whether parameters get gradients.
            keep: ``retain_graph``. Else ranks drop what they have kept for the call.
            input_gradient: whether gradients of the inputs are needed.
            factor: the factor of the gradients that backwards inside of the call have left aside;
                ``None``: there are none.

        Returns:
            Per micro-batch, the gradients of the inputs; empty lists if they are not needed.

        Raises:
            Exception: the driver's own stage has failed. Failures of workers come with the answer
                to a later command.
        """
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
            # (after the flush, which brings gradients that were set by hand to their owners)
            self._commands.remote.gradients.refuse_parts()
        overlap = self._gradients.overlap(self._step_calls.count)
        reduce = parameters and overlap and not self.weight_hooks.held
        was, now = call.key.trainable, self.trainable()
        # (what was frozen in the forward is not part of its graph, and gets no gradient either)
        trainable = None if now == was else tuple([a and b for a, b in zip(was, now)])
        averaged = False
        if parameters and call.averages:
            ours = self.engine.averaging_group.aside_of == call.number
            usual = reduce and ours and trainable is None and not keep
            averaged, call.averages = self._gradients.take_inside(factor if usual else None), False
        mode = Backward(
            network=self.number,
            call=call.number,
            pattern=pattern,
            exchange=exchange,
            parameters=parameters,
            keep=keep,
            input_gradient=input_gradient,
            reduce=reduce and not averaged,
            trainable=trainable,
            averaged=averaged,
        )
        self._commands.tell(mode)
        self._average_what_workers_do(trainable or was)
        if not keep:
            self.calls.pop(call.number, None)
        if parameters and not reduce:
            self._gradients.unaveraged.add(self.number)
        with self._commands.workers.passing(self.engine):
            found = self.engine.backward(call, mode, gradients, factor)
        # (only after a pass that went well: one that fails tells stages that nothing has gradients)
        self._patterns[pattern_key] = pattern
        return found

    def drop(self, number: int) -> None:
        """Note that the outputs of a call were dropped, so that no backward will come.

        The next forward frees what ranks keep for it. A finaliser may call this at any moment.

        Args:
            number: number of the call.
        """
        self._dropped.append(number)

    def open_call(
        self, key: CallKey, ahead: int = 0, again: Call | None = None, *, averages: bool = False
    ) -> tuple[Call, Forward]:
        """Open a call, and make the command that has the workers run its forward; send nothing.

        Args:
            key: the key of the call.
            ahead: how many batches before its turn the call begins; 0: it is its turn.
            again: the same call, if it has run before.
            averages: whether the gradients that its backwards leave aside are averaged over the
                replicas inside of the call.

        Returns:
            The call on this rank, and the command.
        """
        number = self._numbers.get(key)
        exchange = number is None
        if number is None and ahead:
            # (launched calls with the same new key have one number, before the first is over)
            number = self._early_numbers.get(key)
        if number is None:
            number = self.add_key(key)
        if exchange and ahead:
            self._early_numbers[key] = number
        # (with a new key no rank knows whether a stage draws what its graph does not show, so the
        # generators' state is sent in any case)
        shown = self._graphs[key.specialization].uses_rng
        uses_rng = exchange or shown or self.uses_rng(number)
        self._count += 1
        calls = self._step_calls
        if again is not None:
            draw = again.draw
        else:
            draw = calls.seed_number_ahead(ahead) if ahead else calls.take_seed_number(key.grad)
        early = ahead > 0
        new_key = key if exchange else None
        command = Forward(
            network=self.number,
            call=self._count,
            draw=draw,
            key=number,
            exchange=exchange,
            uses_rng=uses_rng,
            ahead=early,
            new_key=new_key,
            again=again is not None,
            averages=averages,
        )
        return self.open(command), command

    def _averages_inside(self) -> bool:
        """Whether the call that begins now averages gradients over the replicas inside of it.

        These are the gradients that backwards inside of the call leave aside. All replicas get the
        same answer.
        """
        if self.placement.schedule != INSIDE:
            return False
        begins = self._gradients.begin_inside(self.number, self._step_calls.count)
        return begins and not self.weight_hooks

    def _refresh(self, graph: NetworkGraph, *, grad: bool) -> None:
        """Prepare a forward: send ranks the tensors that their stages use and others have changed.

        These are buffers that the user's code has replaced, and tied weights. What the forward will
        write to is marked as stale here.

        Args:
            graph: the graph that is called.
            grad: whether a backward may follow.
        """
        remote = self._commands.remote
        remote.adopt_replaced()
        if self._borrowing.active:
            self._borrowing.refresh(grad=grad)
        remote.changed |= bool(graph.written)
        if graph.writes_parameters:
            remote.outdate(RemoteKind.PARAMETER)

    def _average_what_workers_do(self, trainable: tuple[bool, ...]) -> None:
        """If this driver has a copy of a stage, have it average the gradients that workers average.

        All copies of a stage must sum the gradients of the same parameters: those for which the
        workers compute gradients. A driver without a copy does nothing.

        Args:
            trainable: ``requires_grad`` of every parameter, as the workers were told.
        """
        if self._has_copy:
            flags = zip(self._parameters, trainable)
            self.engine.averaging_group.trainable = {p for p, trains in flags if trains}

    def _launch(self, specialization: Specialization, leaves: Sequence[Tensor]) -> None:
        """Under a streamed schedule, launch the calls of later batches.

        Args:
            specialization: the graph that the call of the current batch runs.
            leaves: the inputs of that call.
        """

        def split(others: Sequence[Tensor]) -> tuple[CallKey, list[Values]]:
            slices, numbers = specialization.split(others)
            return self._key(specialization.number, slices, numbers, True, False), slices

        if self.stream is not None:
            self.stream.launch(specialization.graph, leaves, split)

    def _free(self, number: int) -> None:
        """Have all ranks drop what they keep for the backward of a call.

        Args:
            number: number of the call; nothing is done if it was dropped before.
        """
        if self.calls.pop(number, None) is not None:
            self._commands.tell(FreeCall(self.number, number))

    def _key(
        self,
        specialization: int,
        slices: Sequence[Sequence[Tensor]],
        numbers: NumbersOfMicrobatches,
        grad: bool,
        continues_generators: bool,
        inside: Inside = "",
    ) -> CallKey:
        specs = tuple(
            tuple(TensorSpec.of(tensor, gradient=grad) for tensor in leaves) for leaves in slices
        )
        precision = CallPrecision.current(self.engine.device)
        # (all that decides what is sent and how stages compute; a known key is sent as a number)
        training, trainable = self.module.training, self.trainable()
        return CallKey(
            specialization,
            specs,
            numbers,
            grad,
            training,
            trainable,
            precision,
            continues_generators,
            inside,
        )


def _inside(graph: NetworkGraph, ends: Ends | None) -> Inside:
    """The order of micro-batches in a call with backwards inside; empty: none run inside.

    Args:
        graph: the graph that is called.
        ends: see :meth:`DrivenNetwork.forward`.
    """
    if ends is None:
        return ""
    # gradients are added up as in autograd's order, but running statistics in that of the batch
    return "rising" if graph.written else "falling"
