"""A worker: it owns stages of each network, not the last one, and obeys its driver."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.heartbeat import Heartbeat
from lightning_hybrid.comm.links import link_stages
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.protocol import (
    Answer,
    Backward,
    Check,
    ClearGradients,
    ClipValues,
    Command,
    Cut,
    Drop,
    End,
    ForgetFailure,
    Forward,
    Free,
    GiveBorrowedGradients,
    GiveGradients,
    GiveOptimizer,
    GiveWeights,
    GradientNorm,
    NameGradients,
    Reduce,
    Report,
    ScaleGradients,
    Share,
    Skip,
    Step,
    SynchronizeBuffers,
    TakeGradients,
    TakeGroups,
    TakeOptimizers,
    TakeWeights,
    Unscale,
    ZeroGrad,
)
from lightning_hybrid.comm.signals import signals_ignored
from lightning_hybrid.comm.transport import ConnectionLost
from lightning_hybrid.network import Stage
from lightning_hybrid.pipeline.engine import Engine
from lightning_hybrid.pipeline.performance import Stopwatch
from lightning_hybrid.pipeline.replicas import Copies, state_buffers
from lightning_hybrid.pipeline.staged import (
    StagedNetwork,
    names_of,
    own_buffers,
    own_parameters,
    tensors_of,
    write_tensors,
)
from lightning_hybrid.pipeline.stages import StageOptions
from lightning_hybrid.pipeline.trace import Trace
from lightning_hybrid.runtime.clipping import gradient_norms, gradients_of
from lightning_hybrid.runtime.large import Takeover, share_optimizers
from lightning_hybrid.runtime.optimizers import state_of, take_groups, unship
from lightning_hybrid.runtime.scaling import unscale

DRIVER = 0


class Worker:
    """Serves the commands of one run.

    Args:
        module: the LightningModule of this rank. Its training flags and weights follow the
            driver's for the stages that this rank owns.
        mesh: the groups.
        device: where the stages go.
        options: how they compute.
        watch: adds up the time in which this rank computes.
        reports: what the driver may ask this rank for, by name.

    Attributes:
        optimizers: the user's, with the state of what this rank owns.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        device: torch.device,
        options: StageOptions,
        watch: Stopwatch | None = None,
        reports: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        self._options = options
        self._module, self._mesh, self._device = module, mesh, device
        self._channel = mesh.channel(DRIVER)
        self._trace = Trace(mesh.coordinates.rank, str(mesh.coordinates), watch)
        self._reports = reports
        self._networks: list[StagedNetwork] = []
        self.optimizers: list[Optimizer] = []
        self._parameters = dict(module.named_parameters())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._modes: tuple[int, int] | None = None
        self._failure: Failure | None = None
        self._takeover: Takeover | None = None
        self._handlers: dict[type[Command], Callable[[Any], Answer | None]] = {
            Cut: self._cut,
            Forward: self._forward,
            Backward: self._backward,
            Free: self._free,
            Drop: self._drop,
            Skip: self._skip,
            Reduce: self._reduce,
            SynchronizeBuffers: self._synchronize_buffers,
            Share: self._share_weights,
            TakeOptimizers: self._take_optimizers,
            TakeGroups: self._take_groups,
            GiveOptimizer: self._give_optimizer,
            ZeroGrad: self._zero_grad,
            Step: self._step,
            GradientNorm: self._gradient_norm,
            ScaleGradients: self._scale_gradients,
            ClipValues: self._clip_values,
            Unscale: self._unscale,
            GiveWeights: self._give_weights,
            TakeWeights: self._take_weights,
            NameGradients: self._name_gradients,
            GiveGradients: self._give_gradients,
            GiveBorrowedGradients: self._give_borrowed_gradients,
            TakeGradients: self._take_gradients,
            ClearGradients: self._clear_gradients,
            Check: self._answer_only,
            Report: self._report,
            ForgetFailure: self._forget_failure,
            End: self._answer_only,
        }

    def serve(self) -> Any:
        """Obey until the run ends.

        Returns:
            What the driver sends at the end: its results.

        Raises:
            Exception: the driver's, which has failed; caused by a RemoteError. Or this rank's, in
                the middle of what ranks do together.
            ConnectionLost: the driver was lost.
        """
        self._heartbeat = Heartbeat([self._channel], self._mesh.timeout)
        with signals_ignored():
            try:
                return self._serve()
            finally:
                self._heartbeat.close()
                self._trace.write()
                for network in self._networks:
                    network.engine.copies.close()

    def _serve(self) -> Any:
        while True:
            self._heartbeat.on = False
            command = self._channel.receive(Command)
            self._heartbeat.on = command.answered
            answer = self._carry_out(command)
            if command.answered:
                self._channel.send(answer)
            if isinstance(command, End) and self._failure is None:
                self._channel.flush()
                return command.results

    def _carry_out(self, command: Command) -> Answer:
        answer = None
        try:
            answer = self._handlers[type(command)](command)
        except ConnectionLost:
            raise
        except Exception as error:
            if command.joint:  # nobody would wake those who wait for this rank in it
                if self._failure is None:
                    raise
                first = self._failure.exception()
                raise first from first.__cause__
            self._fail(error)
        return answer or Answer() if self._failure is None else Answer(self._failure)

    def _fail(self, error: Exception) -> None:
        """Note an error, for the next answer; the first one counts."""
        self._failure = self._failure or Failure.of(error, str(self._mesh.coordinates))

    def _answer_only(self, _: Command) -> None:
        """All that there is to do: tell whether all went well up to here."""

    # -- the network

    def _cut(self, order: Cut) -> None:
        # first of all: the others wait for this rank in it
        known = order.network < len(self._networks)
        links = {} if known else link_stages(self._mesh, order.devices, self._device)
        network = self._module.get_submodule(order.name)
        stages = {n: Stage(code, network, self._device) for n, code in order.stages.items()}
        if known:
            self._networks[order.network].engine.add_specialization(stages)
            return
        mine = [stages[number] for number in links]
        prefix = f"{order.name}." if order.name else ""
        names = [prefix + n for n in names_of(mine)]
        whole = [*network.named_parameters(), *network.named_buffers()]
        self._takeover = Takeover(
            self._module, names, (prefix + n for n, _ in whole), self._mesh.coordinates
        )
        for stage in mine:
            stage.move(self._device)
        own = own_parameters(mine, order.borrowed)
        state, buffers = partial(state_buffers, network), partial(own_buffers, mine)
        copies = Copies(own, buffers, self._mesh.data_parallel, self._trace, state)
        engine = Engine(
            stages,
            order.devices,
            self._mesh.coordinates,
            links,
            copies,
            self._device,
            order.schedule,
            order.seed,
            self._trace,
            self._options,
        )
        staged = StagedNetwork(order.network, order.name, network, engine, order.borrowed)
        self._networks.append(staged)

    def _forward(self, command: Forward) -> None:
        network = self._networks[command.network]
        self._hear_key(network, command)
        opened = network.open(
            command.call,
            command.draw,
            command.key,
            exchange=command.exchange,
            uses_rng=command.uses_rng,
            ahead=command.ahead,
        )
        before, key = self._failure, opened.key
        with ExitStack() as surroundings:
            try:
                surroundings.enter_context(key.precision.applied())
                if self._modes != (command.network, command.key):
                    network.set_trainable(key)
                    self._modes = (command.network, command.key)
            except Exception as error:  # the other stages wait for this one all the same
                self._fail(error)
            network.engine.failure = self._failure
            with torch.set_grad_enabled(key.grad):
                network.engine.forward(opened)
        # what fails in a forward the driver hears of at its end: the user may catch it and go on
        self._failure = before

    def _backward(self, command: Backward) -> None:
        network = self._networks[command.network]
        calls = network.calls
        opened = calls[command.call] if command.keep else calls.pop(command.call)
        network.engine.failure = self._failure
        network.engine.backward(opened, command)
        self._failure = network.engine.failure

    def _hear_key(self, network: StagedNetwork, command: Forward | Skip) -> None:
        # of several calls that are under way with a new key, the first one brings it
        if command.new_key is not None and command.key not in network.keys:
            network.add_key(command.new_key, command.key)

    def _free(self, command: Free) -> None:
        network = self._networks[command.network]
        call = network.calls.pop(command.call, None)
        if call is not None:
            network.engine.commit(call)

    def _drop(self, command: Drop) -> None:
        network = self._networks[command.network]
        network.engine.drop(network.calls.pop(command.call))

    def _skip(self, command: Skip) -> None:
        network = self._networks[command.network]
        self._hear_key(network, command)
        call = network.open(
            command.call, 0, command.key, exchange=command.exchange, uses_rng=command.uses_rng
        )
        del network.calls[command.call]
        network.engine.discard(call)

    def _reduce(self, command: Reduce) -> None:
        self._networks[command.network].engine.copies.reduce()

    def _synchronize_buffers(self, command: SynchronizeBuffers) -> None:
        for network in self._networks:
            network.engine.copies.broadcast_buffers(state=command.state)

    def _share_weights(self, command: Share) -> None:
        self._networks[command.network].engine.copies.broadcast_weights()
        if command.optimizers:
            share_optimizers(self.optimizers, self._names, self._mesh.data_parallel, self._device)

    # -- the optimizers

    def _take_optimizers(self, command: TakeOptimizers) -> None:
        before, self.optimizers = self.optimizers, unship(command.data, self._parameters)
        for index, (old, new) in enumerate(zip(before, self.optimizers)):
            for parameter, state in () if command.fresh >> index & 1 else old.state.items():
                new.state.setdefault(parameter, state)

    def _take_groups(self, command: TakeGroups) -> None:
        take_groups(self.optimizers[command.optimizer], command.groups, self._parameters)

    def _give_optimizer(self, command: GiveOptimizer) -> Answer:
        return Answer(value=state_of(self.optimizers[command.optimizer], self._names))

    def _zero_grad(self, command: ZeroGrad) -> None:
        self.optimizers[command.optimizer].zero_grad(command.set_to_none)

    def _step(self, command: Step) -> None:
        if self._failure is not None:
            return
        optimizer = self.optimizers[command.optimizer]
        if command.groups is not None:
            take_groups(optimizer, command.groups, self._parameters)
        optimizer.step()

    def _gradient_norm(self, command: GradientNorm) -> Answer:
        optimizer = self.optimizers[command.optimizer]
        return Answer(value=gradient_norms(optimizer, self._names, command.order))

    def _scale_gradients(self, command: ScaleGradients) -> None:
        for gradient in gradients_of(self.optimizers[command.optimizer]):
            gradient.mul_(command.factor)

    def _clip_values(self, command: ClipValues) -> None:
        for gradient in gradients_of(self.optimizers[command.optimizer]):
            gradient.clamp_(-command.bound, command.bound)

    def _unscale(self, command: Unscale) -> Answer:
        gradients = gradients_of(self.optimizers[command.optimizer])
        return Answer(value=unscale(gradients, command.factor))

    # -- weights and gradients, as the driver's proxies show and change them

    def _give_weights(self, command: GiveWeights) -> Answer:
        tensors = tensors_of(self._module)
        return Answer(tensors=[(name, tensors[name]) for name in command.names])

    def _take_weights(self, command: TakeWeights) -> None:
        arrived: list[str] = []

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in command.tensors:
                yield name, value
                arrived.append(name)

        write_tensors(self._module, each())
        if self._takeover is not None:
            takeover, self._takeover = self._takeover, None
            takeover.settle(arrived)

    def _name_gradients(self, _: NameGradients) -> Answer:
        owned = [name for network in self._networks for name in network.owned()]
        named = self._parameters
        return Answer(value=[n for n in owned if n in named and named[n].grad is not None])

    def _give_gradients(self, command: GiveGradients) -> Answer:
        gradients = [(name, self._parameters[name].grad) for name in command.names]
        return Answer(tensors=[(name, grad) for name, grad in gradients if grad is not None])

    def _give_borrowed_gradients(self, _: GiveBorrowedGradients) -> Answer:
        gradients: dict[str, torch.Tensor] = {}
        for network in self._networks:
            prefix = f"{network.name}." if network.name else ""
            for name in sorted(network.borrowed):
                parameter = self._parameters[prefix + name]
                if parameter.grad is not None:
                    gradients[prefix + name], parameter.grad = parameter.grad, None
        return Answer(tensors=gradients.items())

    def _take_gradients(self, command: TakeGradients) -> None:
        for name, value in command.tensors:
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = value.to(parameter.device)
            elif command.add:
                parameter.grad.add_(value.to(parameter.device))
            else:
                parameter.grad.copy_(value)

    def _clear_gradients(self, command: ClearGradients) -> None:
        for name in command.names:
            self._parameters[name].grad = None

    # -- the run

    def _report(self, command: Report) -> Answer:
        return Answer(value=self._reports[command.name]())

    def _forget_failure(self, _: ForgetFailure) -> None:
        self._failure = None
