"""A worker: it owns earlier stages of each network, and carries out its driver's commands."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.comm import (
    Answer,
    ConnectionLost,
    Failure,
    Heartbeat,
    Mesh,
    NcclGuard,
    connect,
    protocol,
    set_switches,
    signals_ignored,
)
from lightning_hybrid.comm.protocol import Command
from lightning_hybrid.graph import Stage
from lightning_hybrid.remote import occupy, vacate
from lightning_hybrid.stage import (
    Engine,
    LendingLine,
    StagedNetwork,
    StageOptions,
    Stopwatch,
    Trace,
    lent_parameters,
    names_of,
    state_buffers,
    tensors_of,
)
from lightning_hybrid.state import FilesOfWorker
from lightning_hybrid.worker.worker_optimizers import WorkerOptimizers
from lightning_hybrid.worker.worker_shards import WorkerShards
from lightning_hybrid.worker.worker_weights import WorkerWeights

BUSY = "busy_s"
"""Name of the report with the seconds that a worker has computed in the run."""
DRIVER = 0
CommandHandler = Callable[[Any], Answer | None]


class Worker:
    """Carries out the commands of the driver during one run.

    Args:
        module: a module that has the names and shapes of the LightningModule. In the stages that
            this rank owns, its ``requires_grad`` flags and weights follow the driver's.
        mesh: the process groups and channels of this rank.
        options: how the stages compute.
        watch: adds up the time in which this rank computes, which the driver may ask for; ``None``:
            it is not measured.
        shards: whether states of optimizers are divided over the replicas.
        before: the worker of this rank in the same run until now, which had other stages.

    Attributes:
        others_follow: whether :meth:`serve` has ended since the networks get other stages, for
            which another `Worker` is needed in the same run.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        options: StageOptions,
        watch: Stopwatch | None = None,
        *,
        shards: bool = False,
        before: "Worker | None" = None,
    ) -> None:
        self._options = options
        self._module = module
        # (the driver has taken the weights of the stages before, and sends those of the next ones)
        for tensor in () if before is None else tensors_of(module).values():
            vacate(tensor)
        self._mesh = mesh
        self._device = mesh.device
        self._channel = mesh.channel(DRIVER)
        new_trace = partial(Trace, mesh.coordinates.rank, str(mesh.coordinates), watch)
        self._trace: Trace = before._trace if before else new_trace()
        self._reports: dict[str, Callable[[], Any]] = {}
        if watch is not None:
            self._reports[BUSY] = watch.read
        self._networks: list[StagedNetwork] = []
        # (a tied weight is there under each of its names, since commands may use any)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._files = FilesOfWorker()
        here = mesh.coordinates
        group = mesh.data_parallel if shards and here.replicas > 1 else None
        self._optimizers = WorkerOptimizers(parameters, self._files, group)
        line = LendingLine(mesh, here.pp_rank)
        self._weights = WorkerWeights(module, parameters, self._networks, self._files, line)
        self._shards = WorkerShards(module, self._optimizers, here.index)
        self._handlers = _handlers(self, self._optimizers, self._weights, self._shards)
        self._trainable: tuple[int, tuple[bool, ...]] | None = None
        self._failure: Failure | None = None
        self.others_follow = False

    def serve(self) -> None:
        """Carry out the driver's commands until the run ends, or until other stages follow.

        At the end the heartbeat, files and hooks of this worker are closed, also after an error.

        Raises:
            Exception: the error of the driver, if that has failed (caused by a RemoteError); or an
                error of this rank in a command that ranks carry out together.
            ConnectionLost: the connection to the driver was lost.
        """
        self._heartbeat = Heartbeat([self._channel], self._mesh.timeout)
        guard, failed = NcclGuard.where_needed(self._mesh), True
        with signals_ignored():
            try:
                self._serve()
                failed = False
            finally:
                self._files.close()
                self._shards.close()
                self._heartbeat.close()
                if guard is not None:
                    guard.close(failed=failed)
                self._trace.write()
                for network in self._networks:
                    network.engine.averaging_group.close()

    def _serve(self) -> None:
        """Receive commands, carry them out and answer, until the run ends."""
        while True:
            # (sign of life only while the driver waits for an answer)
            self._heartbeat.on = False
            command = self._channel.receive(Command)
            self._heartbeat.on = command.answered
            answer = self._carry_out(command)
            if command.answered:
                self._channel.send(answer)
            # (after a failure this worker serves on: the driver hears of it by the answer)
            if self._failure is None and isinstance(command, protocol.End):
                self._channel.flush()
                self.others_follow = command.stages_follow
                return

    def _carry_out(self, command: Command) -> Answer:
        """Carry out a command, and make the answer to it.

        An error of the command is kept, not raised: this answer and all later ones have the first
        error, until the driver sends a command to forget it.

        Raises:
            Exception: this rank has failed in a command that ranks carry out together.
            ConnectionLost: another rank was lost.
        """
        answer = None
        if self._failure is not None and isinstance(command, protocol.StepOptimizer):
            # (its gradients are incomplete, so it does not step)
            self._optimizers.attend(command)
            return Answer(self._failure)
        try:
            answer = self._handlers[type(command)](command)
        except ConnectionLost:
            raise
        except Exception as error:
            if command.joint:  # (other ranks wait for this one in it, so this rank must end)
                if self._failure is None:
                    raise
                first = self._failure.exception()
                raise first from first.__cause__
            self._fail(error)
        return answer or Answer() if self._failure is None else Answer(self._failure)

    def _fail(self, error: Exception) -> None:
        """Keep an error for the answers from now on, unless an earlier one is kept already."""
        self._failure = self._failure or Failure.of(error, str(self._mesh.coordinates))

    def _give_failure(self, _: Command) -> None:
        """Do nothing: as every answer does, the answer says whether this rank has failed."""

    _end = _give_failure

    def _take_switches(self, command: protocol.TakeSwitches) -> None:
        set_switches(command.values)

    # -- the network

    def _cut_network(self, order: protocol.CutNetwork) -> None:
        """Make this rank's stages of a network, or of another graph of a known network."""
        # (links first of all: the other ranks wait for this one while they link their stages)
        connect(self._mesh, order.placement.devices)
        network = self._module.get_submodule(order.name)
        stages = {n: Stage(code, network, self._device) for n, code in order.stages.items()}
        if order.network < len(self._networks):
            self._networks[order.network].engine.add_specialization(stages)
            return
        mine = [*stages.values()]
        prefix = f"{order.name}." if order.name else ""
        names = [prefix + n for n in names_of(mine)]
        tensors = tensors_of(self._module)
        for name in names:
            occupy(tensors[name])
        for stage in mine:
            stage.move(self._device)
        engine = Engine(
            network,
            stages,
            order.placement,
            self._options,
            mesh=self._mesh,
            seed=order.seed,
            trace=self._trace,
        )
        lent = lent_parameters(network, order.placement)[self._mesh.coordinates.pp_rank]
        self._weights.lent += [prefix + name for name in sorted(lent)]
        self._networks.append(StagedNetwork(order.network, order.name, network, engine))

    def _forward(self, command: protocol.Forward) -> None:
        """Run the forward of a call through this rank's stages.

        An error in it travels with the pass, and is raised on the driver at the end of the pass.
        """
        network = self._networks[command.network]
        if command.new_key is not None and command.key not in network.keys:
            network.add_key(command.new_key, command.key)
        opened = network.open(command)
        # (after an error the engine still sends the messages that the next stages wait for)
        before, key = self._failure, opened.key
        with ExitStack() as surroundings:
            try:
                surroundings.enter_context(key.precision.applied())
                self._set_trainable(network, key.trainable)
            except Exception as error:  # (the engine runs all the same, see above)
                self._fail(error)
            network.engine.failure = self._failure
            with torch.set_grad_enabled(key.grad):
                network.engine.forward(opened)
        # (a failure of this forward is no failure of the worker: the driver raises it at the end of
        # the pass, and the user may catch it and go on)
        self._failure = before

    def _backward(self, command: protocol.Backward) -> None:
        network = self._networks[command.network]
        calls = network.calls
        opened = calls[command.call] if command.keep else calls.pop(command.call)
        now = command.trainable
        self._set_trainable(network, opened.key.trainable if now is None else now)
        network.engine.failure = self._failure
        network.engine.backward(opened, command)
        self._failure = network.engine.failure

    def _set_trainable(self, network: StagedNetwork, flags: tuple[bool, ...]) -> None:
        """Set ``requires_grad`` of a network's parameters; skipped if they were just set so.

        Args:
            network: the network.
            flags: one flag for each parameter, in the order of the driver's command.
        """
        if self._trainable != (network.number, flags):
            network.set_trainable(flags)
            self._trainable = (network.number, flags)

    def _free_call(self, command: protocol.FreeCall) -> None:
        self._networks[command.network].calls.pop(command.call, None)

    def _commit_early_forward(self, command: protocol.CommitEarlyForward) -> None:
        network = self._networks[command.network]
        network.engine.commit(network.calls[command.call])

    def _drop_early_forward(self, command: protocol.DropEarlyForward) -> None:
        network = self._networks[command.network]
        network.engine.drop(network.calls.pop(command.call))

    def _reduce(self, command: protocol.Reduce) -> None:
        self._networks[command.network].engine.averaging_group.reduce()

    def _await_sums(self, _: protocol.AwaitSums) -> Answer:
        groups = [network.engine.averaging_group for network in self._networks]
        return Answer(holds=all(group.is_complete() for group in groups))

    def _sum_again(self, command: protocol.SumAgain) -> None:
        assert self._mesh.survivors is not None
        self._mesh.survivors.go_on_with(command.living)
        for network in self._networks:
            network.engine.averaging_group.sum_again()

    def _take_averages(self, command: protocol.TakeAverages) -> None:
        for network in self._networks:
            network.engine.averaging_group.take(command.scale)

    def _synchronize_buffers(self, command: protocol.SynchronizeBuffers) -> None:
        among = state_buffers(self._module) if command.state else None
        for network in self._networks:
            network.engine.averaging_group.broadcast_buffers(among)

    def _broadcast_weights(self, command: protocol.BroadcastWeights) -> None:
        self._networks[command.network].engine.averaging_group.broadcast_weights()

    # -- the run

    def _give_report(self, command: protocol.GiveReport) -> Answer:
        return Answer(value=self._reports[command.name]())

    def _forget_failure(self, _: protocol.ForgetFailure) -> None:
        self._failure = None


def serve(
    module: nn.Module,
    mesh: Mesh,
    options: StageOptions,
    watch: Stopwatch | None = None,
    *,
    shards: bool = False,
) -> None:
    """Carry out the commands of a driver until its run is over; return then.

    If the driver cuts its networks at other places meanwhile, another `Worker` follows. For
    arguments and errors see :class:`Worker` and :meth:`Worker.serve`.
    """
    worker = Worker(module, mesh, options, watch, shards=shards)
    worker.serve()
    while worker.others_follow:
        worker = Worker(module, mesh, options, watch, shards=shards, before=worker)
        worker.serve()


def _handlers(*parts: object) -> dict[type[Command], CommandHandler]:
    """Find the method that carries out each type of command.

    Its name is that of the type in lower case: ``_take_weights`` for ``TakeWeights``.

    Args:
        parts: the objects that have these methods.

    Returns:
        The methods by type of command.
    """
    found: dict[type[Command], CommandHandler] = {}
    for kind in protocol.MESSAGES:
        if issubclass(kind, Command):
            name = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", kind.__name__)
            for part in parts:
                if hasattr(part, name):
                    found[kind] = getattr(part, name)
    return found
