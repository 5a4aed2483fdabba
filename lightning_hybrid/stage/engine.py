"""Executes a schedule's lists of instructions for the stages of one rank.

Mostly a rank has one stage. Under a free placement it has several, and their lists are merged into
one (:mod:`lightning_hybrid.schedules.merged`); each keeps its own links, values and shapes.

The driver and the workers run the same engine. But the driver, which has the last stage of the
network, also sends the inputs to stage 0 and returns the outputs.

Under the schedule `1f1b` backwards run inside of the forward. The gradients of parameters are then
put *aside* (`Call.aside`), and the user's backward adds them to ``parameter.grad``.

Shapes are exchanged once. The first call with a new :class:`CallKey` sends a header before each
micro-batch. From then on both sides know the shapes, and no headers travel.

**A rank that has failed goes on to send and receive**, since nobody can wake a peer that waits in a
receive: after an error it exchanges what its list says, with zeros, and the error travels to the
driver behind the activations.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid._torch.tensors import as_they_are, multiply_each
from lightning_hybrid.comm import (
    CallKey,
    Failure,
    Mesh,
    Status,
    TensorSpec,
    copies_of,
    link_copies,
)
from lightning_hybrid.comm.protocol import Backward, Placement
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.graph import Stage
from lightning_hybrid.schedules import BACKWARD_KINDS, STREAMED
from lightning_hybrid.stage.backward_pass import BackwardPass
from lightning_hybrid.stage.calls import (
    Call,
    Ends,
    Gradients,
    Traffic,
    Values,
    gradients_aside,
    leaves_of,
)
from lightning_hybrid.stage.early_forwards import EarlyForwards
from lightning_hybrid.stage.forward_pass import ForwardPass, Pass
from lightning_hybrid.stage.gradient_averaging import ONLY_DENSE, AveragingGroup
from lightning_hybrid.stage.rank_stages import (
    OwnedStage,
    StageOptions,
    Todo,
    borrowed_parameters,
    lists_of,
)
from lightning_hybrid.stage.statistics_of_copies import StatisticsOfCopies
from lightning_hybrid.stage.synchronised_batchnorm import Synchronised
from lightning_hybrid.stage.trace import Trace

FACTOR = TensorSpec((), torch.float64)
"""Spec of the argument ``factor`` of :meth:`Engine.backward`, as it travels from rank to rank."""


class Engine:
    """Runs the stages of one network on one rank.

    Args:
        network: the network.
        stages: this rank's stages of it, by number, in rising order.
        placement: on which ranks all of its stages are, and how they are scheduled.
        options: how stages compute.
        mesh: the process groups of this rank. All ranks of the replica must have called
            :func:`~lightning_hybrid.comm.activation_links.connect` for this placement before.
        seed: seed of the random numbers inside the network.
        trace: records when this rank computes.

    Attributes:
        borrowed: names in the network of parameters that this rank uses and another rank of its
            replica owns.
        averaging_group: averages the gradients of this rank's stages over the replicas.
        sparse: by name in the network, weights of this rank's stages with sparse gradients, which
            cannot be averaged; empty if there is only one replica, and one copy of these stages.
        replayed: keeps what forwards of a stage that has copies would write to running statistics;
            ``None``: no stage of this rank has copies.
        done_before: parameters of this rank whose gradients are final when the last backward of its
            first stage begins.
        owned: the stages of this rank, in rising order.
        early: under a streamed schedule, each stage of this rank with the object that runs its
            early forwards; else empty.
        failure: the first error on this rank or in an earlier stage, which travels to the driver;
            ``None``: there is none.
        shrink: factor by which gradients are multiplied at every cut that they cross
            (``Delayed("fdg", shrink=...)``); else 1.
        recompute: whether activations are recomputed in the backward instead of being kept.
        synchronises: whether batch normalisation takes its statistics over the replicas.
        is_compiled: whether stages run through ``torch.compile``.
        passed: whether the last pass came to its end (an error in a stage does not end a pass).
    """

    def __init__(
        self,
        network: nn.Module,
        stages: Mapping[int, Stage],
        placement: Placement,
        options: StageOptions,
        *,
        mesh: Mesh,
        seed: int,
        trace: Trace,
    ) -> None:
        self.coordinates = mesh.coordinates
        self.placement = placement
        self.device = mesh.device
        self.seed = seed
        self.trace = trace
        here, links = stages.values(), link_copies(mesh, placement.devices, mesh.device)
        copies, driver = copies_of(placement.devices[next(iter(links))]), 0
        self.borrowed = borrowed_parameters(network, placement)[self.coordinates.pp_rank]
        named = {name: value for stage in here for name, value in stage.named_parameters()}
        self.averaging_group = AveragingGroup(
            [value for name, value in named.items() if name not in self.borrowed],
            lambda: dict(pair for stage in here for pair in stage.named_buffers()).values(),
            mesh.owners(copies),
            len(copies),
            # if the driver has a copy beside workers, the workers own and step the parameters
            owns=not self.coordinates.is_driver or driver not in copies[1:],
            survivors=mesh.survivors,
        )
        sparse = set(map(id, weights_with_sparse_gradients(network)))
        alone = self.coordinates.replicas * len(copies) == 1
        self.sparse = {} if alone else {n: v for n, v in named.items() if id(v) in sparse}
        self.replayed: StatisticsOfCopies | None = None
        if len(copies) > 1:
            self.replayed = StatisticsOfCopies(network, partial(mesh.siblings, copies))
        self.failure: Failure | None = None
        self.passed = True
        count, recompute = len(placement.devices), placement.recompute
        streamed = STREAMED.get(placement.schedule)
        delayed = options.delayed_weights if streamed and streamed.delayed else None
        self._ahead = streamed.look_aheads(count)[0] if streamed else 0
        self.shrink = options.shrink
        self.recompute = recompute
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
        self.is_compiled = options.compiled
        self._statistics = options.statistics and Synchronised(options.statistics)
        self.synchronises = bool(self._statistics)

    def forward(
        self, call: Call, inputs: Sequence[Values] = (), ends: Ends | None = None
    ) -> list[Values]:
        """Run this rank's list of forward instructions; all ranks of the replica do so together.

        Args:
            call: the call; what its backward needs is kept in it.
            inputs: on the driver, per micro-batch the values for stage 0.
            ends: on the driver, if backwards run inside of the call (`1f1b`): makes the gradients
                of a micro-batch's outputs (see :data:`~lightning_hybrid.stage.calls.Ends`).

        Returns:
            On the driver, the outputs of each micro-batch, in the order in which they ran; on a
            worker, an empty list.

        Raises:
            Exception: on the driver, what a stage raised; caused by a RemoteError if that stage is
                on another rank. On a worker it is kept in ``failure`` and travels to the driver.
        """
        self.passed = False
        # 1. The instruction list. Ranks go through theirs without agreeing on anything: sends and
        #    receives pair since all lists come from one schedule.
        here = range(len(self.owned))
        if call.key.inside:
            call.aside = leaves_of([self.stage_for(own, call.key) for own in self.owned])
        works = [ForwardPass(self, index, call, inputs, ends) for index in here]
        backs: Sequence[Pass] = works
        if call.key.inside:
            mode = Backward(0, call.number, 0, call.exchange, True, False, False, call.averages)
            backs = [BackwardPass(self, i, call, mode, works[i].gradients) for i in here]
        todo, _ = self.lists(call.key, input_gradient=False)
        for index, kind, microbatch in todo:
            work: Pass = backs[index] if kind in BACKWARD_KINDS else works[index]
            work.do(kind, microbatch)
        # 2. What must wait for all micro-batches of the pass.
        self._send_aside(call)
        for _, early in self.early:
            early.end_forward(call.number)
        if self.replayed is not None:
            # (of the stages of a rank only the first can have copies: if the driver has a copy, its
            # other stage has no layers, and so no statistics)
            copied = self.stage_for(self.owned[0], call.key)
            self.replayed.replay(copied, call.key.microbatches)
        # 3. Errors, stage by stage towards the driver. They come last, since a rank that waits for
        #    a tensor can receive nothing else.
        error = self._first_error(
            [work if work.error else back for work, back in zip(works, backs)]
        )
        if not self.coordinates.is_driver:
            return []
        # 4. On the driver, the user's code comes next.
        if not call.ahead:
            for links in self.owned[-1].links:
                links.next.flush()  # from here on the user may change the inputs
        self.passed = True
        self._raise(error)
        return works[-1].outputs

    def backward(
        self,
        call: Call,
        mode: Backward,
        gradients: Sequence[Gradients] = (),
        factor: Tensor | None = None,
    ) -> list[Gradients]:
        """Run this rank's list of backward instructions; all ranks of the replica do so together.

        If backwards have run inside of the call (`1f1b`), only add the gradients that they have
        left aside (`Call.aside`), times ``factor``, to those of the parameters.

        Args:
            call: the call to go back through.
            mode: the command, which says what is to be computed.
            gradients: on the driver, per micro-batch the gradients of the network's outputs.
            factor: on the driver, if backwards have run inside of the call: the factor for their
                gradients, a float64 scalar on the driver's device. Workers get it from the driver.

        Returns:
            For each micro-batch a list: on the driver the gradients of the network's inputs if
            ``mode.input_gradient`` asks for them (``None``: an input gets none); else empty.

        Raises:
            Exception: on the driver, what its own stage raised. On a worker it is kept in
                ``failure``, and sent to the driver with the next forward.
        """
        if call.key.inside:
            self._add_aside(call, mode, factor)
            return [[] for _ in range(call.key.microbatches)]
        self.passed = False
        # 1. Gradients of weights are about to be added to. If all copies of a stage hold the same
        #    gradient from before, only one keeps it, or their sum would count it several times.
        if mode.parameters:
            self.averaging_group.keep_on_one_copy()
        # 2. The instruction list, as in a forward.
        works = [
            BackwardPass(self, index, call, mode, gradients) for index in range(len(self.owned))
        ]
        _, todo = self.lists(call.key, input_gradient=mode.input_gradient)
        for index, kind, microbatch in todo:
            works[index].do(kind, microbatch)
        # 3. Wait for the averages that were begun on the way (instruction `reduce`). A rank that
        #    has failed does so too: its replicas wait in the same collectives.
        if mode.reduce:
            self.averaging_group.finish()
        self.passed = True
        if self.coordinates.is_driver:
            self._raise(next((work.error for work in works if work.error), None))
        return works[-1].inputs

    def _add_aside(self, call: Call, mode: Backward, factor: Tensor | None) -> None:
        """Add the gradients that backwards inside of a call have left aside to ``parameter.grad``.

        The backward of such a call (`1f1b`); all ranks of the replica call it together.

        Args:
            call: the call.
            mode: the command. With ``averaged`` the averages over the replicas are added that were
                begun inside of the call.
            factor: on the driver, what the gradients are multiplied with; on a worker ``None``.
        """
        if not mode.parameters:
            return
        self.passed = False
        factor = self._pass_on(factor)
        self.averaging_group.keep_on_one_copy()
        if mode.reduce:
            self.averaging_group.arm(self.done_before)
        stages = [self.stage_for(own, call.key) for own in self.owned]
        with as_they_are():
            pairs = self.averaging_group.take_aside() if mode.averaged else []
            if not mode.averaged:
                pairs += gradients_aside(call.aside, stages, keep=mode.keep)
            multiply_each([gradient for _, gradient in pairs], factor)
            while pairs:  # (each is freed when it was added)
                # (`backward`, so that hooks of the weights hear of it as of any other gradient)
                torch.autograd.backward(*pairs.pop())
        if mode.reduce:
            self.averaging_group.finish()
        self.passed = True

    def _send_aside(self, call: Call) -> None:
        """At the end of a forward, begin the averages of gradients that are not begun yet.

        Under `1f1b` backwards run inside of the forward, and collect gradients in `Call.aside`. If
        ``call.averages``, begin here to average over the replicas what those backwards have not
        sent yet; does not wait. A call that runs no backwards takes part with no gradients.
        """
        if call.averages:
            if not call.key.inside:  # (other replicas may go back inside of their calls)
                self.average_aside(call)
            self.averaging_group.send_aside()

    def average_aside(self, call: Call) -> None:
        """Begin to average the gradients that backwards inside of a call leave aside.

        Called right before the last of these backwards (`1f1b`): from then on each gradient is sent
        when it is final. A call that has no such backwards takes part in the averages with no
        gradients. All replicas must call it for the same call.
        """
        leaves: dict[Tensor, Tensor] = {}
        for own, aside in zip(self.owned, call.aside):
            weights = self.stage_for(own, call.key).taken()
            leaves |= {weights[name]: leaf for name, leaf in aside.items()}
        self.averaging_group.arm_aside(call.number, leaves, self.done_before)

    def _pass_on(self, factor: Tensor | None) -> Tensor:
        """Pass the driver's factor on from rank to rank, from the last stage to the first one.

        All ranks of the replica call this together.

        Args:
            factor: on the driver, the factor; on a worker ``None``: it is received from the next
                stage.

        Returns:
            The factor, on this rank's device.
        """
        ranks = self.placement.devices
        for own in reversed(self.owned):
            [links] = own.links
            if factor is None:
                [factor] = links.next.post([FACTOR]).wait()
            # (sent once to each rank: to the last one of its stages)
            if own.number > 0 and ranks[own.number - 1] not in ranks[own.number :]:
                links.previous.send([factor], [FACTOR])
        assert factor is not None, "the driver has it, and others wait for it"
        return factor

    def send_inputs(self, key: CallKey, inputs: Sequence[Values]) -> None:
        """On the driver: begin to send stage 0 the inputs of a call that runs ahead of its turn.

        Under a streamed schedule, at the launch of the call. Does not wait.

        Args:
            key: key of the call.
            inputs: for each micro-batch, the values for stage 0.
        """
        # (in the ring stage 0 comes after the network's last stage, which the driver has)
        links = self.owned[-1].links
        for microbatch, (values, specs) in enumerate(zip(inputs, key.inputs)):
            links.at(microbatch).next.send(values, specs)

    def discard(self, call: Call) -> None:
        """On the driver: receive and drop the activations of a call that has run ahead in vain.

        Under a streamed schedule, if the call will not have its turn. The activations come from the
        stage before the last one, which has run the call's forward all the same.
        """
        # shapes from these headers are not kept: this stage has sent no headers of its own
        scratch = [Traffic() for _ in self.owned] if call.exchange else call.traffic
        work = ForwardPass(self, 0, replace(call, traffic=scratch), ())
        for microbatch in range(call.key.microbatches):
            work.receive_activation(microbatch)
        work.links(0).previous.receive_word(Status)

    def commit(self, call: Call) -> None:
        """Write to the buffers what a call's early forward has written to copies of them.

        Called when the call has its turn: where one device would run its forward. Only under a
        streamed schedule there is something to write.
        """
        for own, early in self.early:
            early.commit(call.number, self.stage_for(own, call.key))

    def drop(self, call: Call) -> None:
        """Discard what a call's early forward has written to copies of buffers: it gets no turn."""
        for _, early in self.early:
            early.drop(call.number)

    def add_specialization(self, stages: Mapping[int, Stage]) -> None:
        """Add this rank's stages of another captured graph of the network.

        Args:
            stages: by number of the stage, its code in that graph; for each stage in ``owned``.
        """
        for own in self.owned:
            own.specializations.append(stages[own.number])

    def _first_error(self, works: Sequence[Pass]) -> Exception | None:
        """End a forward pass: receive a `Status` from earlier stages, and send it to later ones.

        An error of an earlier stage is kept in ``failure``.

        Args:
            works: the pass of each stage of this rank, in the order of ``owned``.

        Returns:
            The error of a stage of this rank; ``None``: there is none, or a stage before it has
            failed, so that it may be a consequence.
        """
        failed = next((index for index, work in enumerate(works) if work.error), None)
        for index, own in enumerate(self.owned):
            for links in own.links if own.number > 0 else ():
                failure = links.previous.receive_word(Status).failure
                if failure and failed is not None and index <= failed:
                    # an error here possibly comes from the zeros that the failed stage has sent
                    self.failure, failed = failure, None
                self.failure = self.failure or failure
            for links in own.links if not own.is_last else ():
                # (the driver raises an error of its own stages itself)
                mine = self.coordinates.is_driver and failed is not None
                links.next.send_word(Status(None if mine else self.failure))
        return None if failed is None else works[failed].error

    def _raise(self, error: Exception | None) -> None:
        """Raise the error of this rank's own stage, or else the failure noted; then forget it.

        Args:
            error: the error of a stage of this rank; ``None``: there is none.
        """
        # reset: the user's code may catch the error, and train on
        failure, self.failure = self.failure, None
        if error is not None:
            raise error  # the driver's own, as it is: the user may catch it and go on
        if failure is not None:
            raise failure.exception()

    # ------------------------------------------------------------------ for passes

    def untaken(self, call: Call) -> int:
        """How many messages a neighbour may have not received yet when a new pass begins.

        Before the pass the stage waits until the neighbour has received all others. 0 unless the
        schedule is streamed.
        """
        return self._ahead * call.key.microbatches

    def lists(self, key: CallKey, *, input_gradient: bool) -> tuple[Todo, Todo]:
        """This rank's lists of instructions for the forward and for the backward of a call.

        Args:
            key: key of the call. If its backwards run inside of it, the first list has these too.
            input_gradient: whether the backward list brings the gradients of the inputs to the
                driver.

        Returns:
            A pair: the list of the forward, and the list of the backward.
        """
        here, microbatches = self.coordinates.pp_rank, key.microbatches
        return lists_of(self.placement, here, microbatches, input_gradient, key.inside)

    def stage_for(self, own: OwnedStage, key: CallKey) -> Stage:
        """Return the code of a stage for calls with a key; it runs compiled if the options say so.

        Args:
            own: the stage.
            key: key of the calls; its ``specialization`` chooses the captured graph.
        """
        stage = own.specializations[key.specialization]
        # at the first use: some graphs of a network never run on a rank
        if self.is_compiled:
            stage.compile_code()
        return stage

    def statistics(self, key: CallKey) -> AbstractContextManager[Any]:
        """Context in which batch normalisation takes its statistics over the replicas.

        It does nothing if calls with this key are not in training mode, or if the options name no
        group for statistics.
        """
        if self._statistics is None or not key.training:
            return nullcontext()
        return self._statistics

    def noting(self, stage: Stage, microbatch: int) -> AbstractContextManager[Any]:
        """Context of a forward in a stage with copies, which notes its changes of statistics.

        `StatisticsOfCopies.replay` applies the changes to the running statistics at the end of the
        pass. The context does nothing if the stage has no copies, or writes to no buffer.
        """
        if self.replayed is None or not stage.written:
            return nullcontext()
        return self.replayed.noting(stage, microbatch)

    def refuse_sparse(self) -> None:
        """Refuse to train a weight whose gradient is sparse, and so cannot be averaged.

        Called in a forward that a backward may follow: an error that a worker raises in a backward
        reaches the driver only after the step.

        Raises:
            NetworkError: there is such a weight.
        """
        for name, weight in self.sparse.items():
            if weight.requires_grad:
                raise NetworkError(f"The gradient of {name!r} is sparse. {ONLY_DENSE}")

    def fail(self, error: Exception, stage: int) -> None:
        """Note an error of a stage in ``failure``, if there is none yet, instead of raising it.

        While ``failure`` is set, this rank computes nothing, and sends zeros in the place of
        results.

        Args:
            error: the error.
            stage: number of the stage.
        """
        where = f"in stage {stage}" if self.coordinates.free else ""
        # the first error: it is mostly the cause of later ones
        self.failure = self.failure or Failure.of(error, str(self.coordinates), where)


def weights_with_sparse_gradients(network: nn.Module) -> Iterator[Tensor]:
    for module in network.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield module.weight
