"""The driver: it runs the user's code, owns the last stage, and drives the workers of its replica.

Under a free placement it may own earlier stages too.

:class:`Driver` makes its parts, which send commands to the workers, and offers them to its callers:
:class:`Distribution` of stages, :class:`Weights`, :class:`ReplicaGradients`,
:class:`DrivenOptimizers`, and the proxies of what the workers own (:class:`Proxies`). The
driver itself adds networks, begins steps, writes sharded checkpoints and ends the run.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from lightning_hybrid._torch.autograd import outside_of_transforms
from lightning_hybrid._torch.modules import outline
from lightning_hybrid.comm import (
    Failure,
    Mesh,
    broadcast_object,
    gather_objects,
    meet,
    protocol,
    signals_deferred,
)
from lightning_hybrid.comm.protocol import Command, Placement
from lightning_hybrid.driver.backward_passes import HeldHooks, UserBackwards
from lightning_hybrid.driver.commands import Commands, Workers
from lightning_hybrid.driver.driven_network import DrivenNetwork, PartsOfDriver
from lightning_hybrid.driver.driven_optimizers import DrivenOptimizers
from lightning_hybrid.driver.gradient_clipping import GradientClipping
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.optimizer_state_dicts import OptimizerStateDicts
from lightning_hybrid.driver.ownership import Ownership
from lightning_hybrid.driver.seed_numbers import StepCalls
from lightning_hybrid.driver.stage_distribution import Distribution
from lightning_hybrid.driver.streamed_calls import Batches
from lightning_hybrid.driver.tied_weights import Borrowing
from lightning_hybrid.driver.weight_hooks import WorkersGradients
from lightning_hybrid.driver.weights import FilesOfWorkers, Replicated, Weights
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.errors import HybridError
from lightning_hybrid.graph import StageCode
from lightning_hybrid.remote import (
    Proxies,
    ViewInMemory,
    give_up,
    is_deferred,
    is_offloaded,
    materialize,
    views_of,
)
from lightning_hybrid.schedules import INSIDE, STREAMED
from lightning_hybrid.stage import (
    AveragingGroup,
    Stopwatch,
    Trace,
    borrowed_parameters,
    lent_parameters,
    state_buffers,
    tensors_of,
)
from lightning_hybrid.state import (
    DividedCheckpoint,
    NoRoom,
    Shard,
    await_shard,
    finish,
    staged,
    write_rest,
    write_shard,
)


class Driver:
    """Drives one replica through one run.

    Args:
        module: the LightningModule.
        mesh: the process groups and channels of this rank.
        options: what the run has decided.
        watch: adds up the time in which this rank computes.
        batches: the training batches, the current one and those after it that are known.
        before: the driver of this replica in the same run until now, which had other stages;
            ``None``: this is the first one of the run.

    Attributes:
        device: the device of this rank.
        commands: sends commands to the workers.
        distribution: gives all ranks their stages.
        remote: the proxies of the tensors that the workers own.
        weights: moves parameters and buffers between the driver and the workers.
        gradients: averages the gradients of this replica's ranks over the replicas.
        user_backwards: runs the backward passes of the user's code, also those for chosen weights
            (``autograd.grad``, ``backward(inputs=)``); see ``driver/backward_passes.py``.
        optimizers: the user's optimizers, which step on all ranks of the replica.
        clipping: clips and unscales gradients on all ranks of the replica.
        state_dicts: makes state dicts of optimizers, of the states of all ranks.
        calls: numbers the calls of networks in the current step.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        options: DriverOptions,
        watch: Stopwatch | None = None,
        batches: Batches | None = None,
        before: "Driver | None" = None,
    ) -> None:
        here = mesh.coordinates
        self._module = module
        self._mesh = mesh
        self.device = mesh.device
        self._options = options
        # with the submodules that the module has now: workers know tensors by their names in it
        self._start = start = outline(module)
        # by name, tensors of workers that this rank has no room for after the run
        self._lost: dict[str, torch.Tensor] = {}
        new_trace = partial(Trace, here.rank, str(here), watch)
        self._trace: Trace = before._trace if before else new_trace()
        self._networks: list[DrivenNetwork] = []
        # in the order of dependence: proxies ask the ownership, commands flush the proxies first,
        # and the parts after these send commands only
        self._workers, unaveraged = Workers(mesh), set[int]()
        self._ownership = Ownership(self._workers, unaveraged)
        self.remote = Proxies(self._ownership, self.device)
        self.commands = Commands(self._workers, self.remote)
        self._files = files = FilesOfWorkers(self.commands, options.folder, here)
        self._borrowing = Borrowing(self.commands, self._ownership, unaveraged)
        self._replicated = Replicated(
            module, start, mesh.data_parallel, self.device, mesh.survivors
        )
        self.calls: StepCalls = (
            before.calls
            if before
            else StepCalls(
                options.seed,
                here.dp_rank,
                self.device,
                as_on_one_device=options.as_on_one_device,
            )
        )
        self.distribution = Distribution(module, mesh, options, self.commands, self._trace)
        self.weights = Weights(
            module,
            start,
            here,
            self.commands,
            self._ownership,
            self._replicated,
            files,
        )
        self.gradients = ReplicaGradients(
            self.commands,
            self._borrowing,
            self._replicated,
            unaveraged,
            survivors=mesh.survivors,
            drivers=mesh.drivers,
        )
        self.optimizers = DrivenOptimizers(
            start, mesh, self.commands, self._ownership, self.gradients, files, options
        )
        self.clipping = GradientClipping(self.optimizers)
        self.state_dicts = OptimizerStateDicts(self.optimizers, mesh, files, options.say)
        self._shards = options.shards and here.replicas > 1
        there = WorkersGradients(self._networks, self.commands, self._ownership)
        hooks = HeldHooks(self._networks, self.gradients.bring_to_owners, there)
        self.user_backwards = UserBackwards(self._networks, self.gradients, hooks)
        # (only buffers that a training step reads must be the same on all replicas in training)
        self._has_state = here.replicas > 1 and bool(state_buffers(module))
        # whether the last step averaged gradients over the replicas
        self._synchronized: bool = before is None or before._synchronized
        self._parts = PartsOfDriver(
            commands=self.commands,
            borrowing=self._borrowing,
            gradients=self.gradients,
            calls=self.calls,
            batches=batches or Batches(),
            scaled=options.scaled,
        )

    def __deepcopy__(self, memo: object) -> "Driver":
        """The driver itself: a copy of a Trainer that refers to it drives the same workers."""
        return self

    # ------------------------------------------------------------------ networks

    @signals_deferred
    def add_network(
        self,
        name: str,
        network: nn.Module,
        codes: Sequence[StageCode],
        placement: Placement,
        *,
        continues_generators: bool,
    ) -> DrivenNetwork:
        """Give every rank of the replica its stages of a network that has been cut.

        From then on workers own the weights of their stages, and have the optimizers; weights that
        workers own are proxies here.

        Args:
            name: dotted name of the network in the LightningModule.
            network: the module.
            codes: the code of each of its stages.
            placement: which ranks get which stage, and under which schedule they run.
            continues_generators: whether the network draws its random numbers from the generators
                of the code around a call, instead of from generators of its own.

        Returns:
            The network, which runs calls of it on all ranks.

        Raises:
            Exception: see :meth:`Distribution.distribute`.
        """
        # before weights are sent: a message that is being sent would be found as a view of them
        number, views = len(self._networks), views_of(network)
        engine, remote = self.distribution.distribute(number, name, network, codes, placement)
        driven = DrivenNetwork(
            number,
            name,
            network,
            engine,
            self._parts,
            continues_generators=continues_generators,
        )
        if placement.schedule in STREAMED:
            self.optimizers.streamed_by = placement.schedule
            # under an exact schedule no batch runs ahead across a step, unless the window of
            # gradient accumulation has become shorter since it was launched
            if not STREAMED[placement.schedule].delayed:
                self.optimizers.before_step = self.interrupt
        elif placement.schedule == INSIDE:
            self.optimizers.before_step = self._weights_change
        self._take_charge(driven, remote, views)
        self._workers.before_weights_change = self._weights_change
        return driven

    @property
    def has_networks(self) -> bool:
        """Whether at least one network is cut into stages."""
        return bool(self._networks)

    @signals_deferred
    def interrupt(self) -> None:
        """Discard the calls of later batches that a streamed schedule has begun early.

        A later step launches these batches again.
        """
        for network in self._networks:
            if network.stream is not None:
                network.stream.drop()

    def _weights_change(self) -> None:
        """Note that weights are about to change.

        From then on no earlier call of a network can be run again with the same result, so that
        this is refused; and calls that were begun early are discarded.
        """
        for network in self._networks:
            network.age += 1
        self.interrupt()

    def have_here(self, module: nn.Module, *, whole: bool = False) -> None:
        """Move a module to the device of this rank, which is about to run its Python.

        Args:
            module: the module; parts of it that are cut stay where they are.
            whole: whether the tensors of its submodules are moved too, or only its own.

        Raises:
            HybridError: the device has not enough memory for it.
        """
        tensors = (*module.parameters(recurse=whole), *module.buffers(recurse=whole))
        materialize(tensors)
        try:
            # (also in an evaluation: what is moved in inference mode could not be trained later)
            with outside_of_transforms(), torch.inference_mode(False):
                for tensor in tensors:
                    # (by `data`: the parameter stays the object that hooks and optimizers refer to,
                    # and the buffer the one that a call which has begun may have taken already)
                    if tensor.device != self.device:
                        gradient = tensor.grad if tensor.is_leaf else None
                        tensor.data = tensor.data.to(self.device)
                        if gradient is not None:
                            gradient.data = gradient.data.to(self.device)
        except torch.OutOfMemoryError as error:
            size = sum(tensor.nbytes for tensor in tensors) / 1e9
            raise HybridError(
                f"{type(module).__name__}, {size:.2f} GB, has no room on {self.device}, where it "
                "is computed as a whole as long as it is not cut. Is that for an evaluation "
                "before the training? Then leave it out: Trainer(num_sanity_val_steps=0), or in a "
                "loop of your own."
            ) from error

    def keep(self, module: nn.Module) -> None:
        """Keep a network whole on this rank's device; the replicas average its gradients.

        If the weights of the replicas possibly differ, all get those of replica 0 (collective over
        the drivers).
        """
        self.have_here(module, whole=True)
        self._replicated.renew_rest()
        if self._options.share:
            self._replicated.rest.broadcast_weights()

    def note_no_cut(self) -> None:
        """Register that no network will be cut: all parameters are the driver's own."""
        self._replicated.note_no_cut()
        self.optimizers.stay_here()

    def _take_charge(
        self,
        driven: DrivenNetwork,
        remote: Mapping[int, tuple[str, ...]],
        views: Sequence[ViewInMemory],
    ) -> None:
        """Tell the parts of the driver which rank owns which tensors of a distributed network.

        Args:
            driven: the network, whose stages all ranks have by now.
            remote: by ``pp_rank`` of each worker, names in the LightningModule of what it owns.
            views: tensors of the user's that show the memory of its weights.
        """
        averaging_group = driven.engine.averaging_group
        self._networks.append(driven)
        copied = self._parameters_of_copy(driven)
        # before optimizers are sent: a state goes to the owner of its parameter
        self._ownership.add(driven.number, remote, copied)
        self._replicated.add(averaging_group, driven.full_names(driven.owned_names))
        if self._options.trains:  # (else with the first step, if an evaluation takes one)
            self.optimizers.ship()
        tensors = tensors_of(self._module)
        owned_there = [name for names in remote.values() for name in names]
        stages = [own.specializations[0] for own in driven.engine.owned]
        used_here = driven.full_names(name for stage in stages for name in stage.buffer_names)
        proxies = (name for name in owned_there if not is_deferred(tensors[name]))
        self.remote.add(self._module, proxies, used_here, views)
        placed = driven.module, driven.placement
        for owner, lent in zip(self._workers.ranks, lent_parameters(*placed)[1:]):
            names = driven.full_names(sorted(lent))
            self._ownership.lend(owner, {name: tensors[name] for name in names})
        borrowed = borrowed_parameters(*placed)
        self._borrowing.add([driven.full_names(sorted(names)) for names in borrowed])
        if self._options.trains:
            self._workers.flush()  # messages that are being sent use the memory of the weights
            self.remote.vacate(self._ownership.lent)
        elif not self._options.share:
            self.remote.adopt_fetched({*owned_there})
        if self._options.share:
            self._share_from_replica_0(driven.number, averaging_group)

    def _parameters_of_copy(self, driven: DrivenNetwork) -> dict[str, nn.Parameter]:
        """By name in the LightningModule, the parameters of this rank's copy of a stage, if any."""
        if not driven.placement.collects:
            return {}
        named = dict(driven.engine.owned[0].specializations[0].named_parameters())
        return dict(zip(driven.full_names(named), named.values()))

    def _share_from_replica_0(self, network: int, averaging_group: AveragingGroup) -> None:
        """Give all replicas the weights of replica 0, since each has made its own.

        All ranks of all replicas take part.

        Args:
            network: number of the network.
            averaging_group: the group of this rank's stages of it.
        """
        # workers are told first: each rank joins the broadcast of its own stages at the same time
        self.commands.tell(protocol.BroadcastWeights(network))
        averaging_group.broadcast_weights()
        self._replicated.rest.broadcast_weights()

    # ------------------------------------------------------------------ a step

    def begin_step(self, batch: int, *, whole: bool = True) -> None:
        """Prepare for a `training_step`: count calls of networks from 0, and synchronize buffers.

        All replicas get the buffers of replica 0 that training reads. As under DDP, they do not
        after a step that has averaged no gradients.

        Args:
            batch: how many training batches the run has seen before.
            whole: whether no autograd graph from before goes on in this step. If so, this rank
                forgets which proxies are in such a graph.
        """
        self.calls.begin(batch)
        if whole:
            self.remote.forget_graph()
        if self._has_state and self._synchronized:
            self.weights.broadcast_buffers(state=True)
        # (with manual optimization DDP takes each step for one that exchanges nothing)
        by_itself = getattr(self._module, "automatic_optimization", True)
        self._synchronized = self.gradients.synchronize and by_itself

    @signals_deferred
    def check(self) -> None:
        """Raise an error if a stage of any replica has failed (collective over the drivers).

        A stage that fails in a backward still takes part in the averaging of gradients, so its
        driver hears of the failure only when it next asks the workers, and until then the other
        replicas train on with what the stage has sent. So this is called before weights are written
        to a checkpoint and at the end of a fit.

        Raises:
            Exception: the error of the first stage that has failed.
        """
        failure = None
        try:
            self.commands.ask(protocol.GiveFailure())
        except Exception as error:
            failure = error
        # called where nothing has failed too: the drivers of the other replicas wait in it
        if not meet(self._mesh.drivers, failed=failure is not None):
            raise failure or self._options.first_failure()

    @signals_deferred
    def save_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """Write a sharded checkpoint: each rank of this replica writes what it owns.

        Where replicas divide the states of optimizers, all drivers call this together.

        Args:
            checkpoint: the ordinary checkpoint, with unread tensors for what workers own. The one
                of replica 0 is written.
            folder: an empty folder that all ranks can write to; the one of replica 0 counts.

        Raises:
            OSError: a rank cannot write.
        """
        divided = DividedCheckpoint.of(checkpoint)
        if not self._shards:
            written = self._write(divided, divided.elsewhere, folder)
        else:
            # replica 0 alone has made the checkpoint, and so knows what each rank is to write
            orders = divided.elsewhere, folder
            elsewhere, folder = broadcast_object(self._mesh.drivers, orders)
            mine = self._write(divided, elsewhere, folder)
            written = [shard for each in gather_objects(self._mesh.drivers, mine) for shard in each]
        for shard in written:
            if isinstance(shard, OSError):
                raise shard
        if self._mesh.coordinates.dp_rank == 0:
            finish(folder, [shard for shard in written if isinstance(shard, Shard)])

    def _write(
        self, divided: DividedCheckpoint, elsewhere: Mapping[int, Any], folder: Path
    ) -> list[Shard | OSError]:
        """Have the ranks of this replica write their parts of a sharded checkpoint.

        Args:
            divided: the checkpoint of this driver, divided by owners.
            elsewhere: by rank of the mesh, what all ranks but replica 0's driver are to write.
            folder: the folder of the checkpoint.

        Returns:
            What each rank has written, or the error that kept it from writing.
        """
        here = self._mesh.coordinates
        mine = range(here.index, here.index + here.ranks_per_replica)
        parts = {rank - here.index: part for rank, part in elsewhere.items() if rank in mine}
        own = {key: self.optimizers.find(owned) for key, owned in parts.pop(0, {}).items()}
        self._tell_shards(parts, folder, staged=False)
        written: list[Shard | OSError] = []
        try:
            if here.dp_rank == 0:
                own = divided.here
                write_rest(folder, divided.rest)
            written.append(write_shard(folder, here.index, own))
        except OSError as error:
            written.append(error)
        finally:  # workers answer in any case, and an answer left would be taken for a later one
            answers = self._workers.hear(parts)
        return written + [answer.value for answer in answers]

    @signals_deferred
    def stage_shards(
        self, checkpoint: Mapping[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]:
        """Copy what a sharded checkpoint consists of, each rank what it owns, to be written later.

        Workers write their copies in the background.

        Args:
            checkpoint: the ordinary checkpoint, with unread tensors for what workers own.
            folder: an empty folder that all ranks can write to.
            given_up: an event that is set when workers may be gone.

        Returns:
            A function for any thread, which writes this rank's copy, waits for those of the workers
            and completes the checkpoint.

        Raises:
            OSError: this rank cannot write to the folder.
        """
        divided = DividedCheckpoint.of(checkpoint)
        self._tell_shards(divided.elsewhere, folder, staged=True)
        try:
            write_rest(folder, divided.rest)
            here = staged(divided.here)
        finally:
            # in any case: an answer that is not received now would be taken for a later one
            self._workers.hear(divided.elsewhere)

        def write() -> None:
            shards = [write_shard(folder, 0, here)]
            shards += [await_shard(folder, rank, given_up) for rank in divided.elsewhere]
            finish(folder, shards)

        return write

    def await_shards(self) -> None:
        """Wait until workers have written the copies that :meth:`stage_shards` has made."""
        self.commands.ask(protocol.AwaitShards())

    def _tell_shards(self, parts: Mapping[int, Any], folder: Path, *, staged: bool) -> None:
        """Have each worker write its part of a sharded checkpoint; wait for no answer.

        Args:
            parts: by ``pp_rank`` of the worker, what it is to write, as `SaveShard` has it.
            folder: the folder of the checkpoint.
            staged: whether workers copy their tensors now, and write the copies later.
        """
        self.commands.tell_each(
            {rank: protocol.SaveShard(str(folder), part, staged) for rank, part in parts.items()}
        )

    @signals_deferred
    def reports(self, name: str) -> list[Any]:
        """Ask all workers for a report; return its value on each, in the order of their ranks.

        Args:
            name: name of the report, such as ``busy_s``; see `GiveReport`.
        """
        return [answer.value for answer in self.commands.ask(protocol.GiveReport(name))]

    # ------------------------------------------------------------------ the end

    @signals_deferred
    def bring_all(self, *, changed: bool = True) -> None:
        """Put the weights, buffers and gradients of all stages into the module on this rank.

        They are mapped from files. Where there is no room for these, the user is told, and after
        :meth:`close` a read of a tensor that a worker owned is an error.

        Args:
            changed: whether the run may have changed any.
        """
        self._ownership.add_copied_gradients()
        trained = {id(p) for network in self._networks for p in network.trained()}
        back = self.weights.take_back(trained if changed else None)
        owned = self.weights.owned_elsewhere()
        if not changed and not any(map(is_offloaded, owned.values())):
            return
        try:
            self.weights.bring_into_module(but=back)
        except NoRoom as error:
            self._options.say(
                f"{error}. So the weights that other ranks have trained end with the run, and a "
                "read of one is an error: checkpoints of the run have all of them."
            )
            self._lost = {name: tensor for name, tensor in owned.items() if name not in back}

    @signals_deferred
    def end(self) -> None:
        """End the run on the workers, after :meth:`close`.

        The user's optimizers get the states of all ranks of the replica.

        Raises:
            Exception: a worker has failed since its last answer.
        """
        self._end(protocol.End())
        self.optimizers.forget()

    @signals_deferred
    def end_stages(self) -> None:
        """End all stages, after :meth:`bring_all` and :meth:`close`; others follow in the same run.

        The user's optimizers get the states of all ranks of the replica, for the next driver.

        Raises:
            Exception: see :meth:`end`.
        """
        self._end(protocol.End(stages_follow=True))

    def _end(self, command: Command) -> None:
        # (after an evaluation too: if it has cut a network, workers have taken states)
        if not self._lost:
            self.optimizers.bring_states()
        # a question, whose answers tell which workers have failed since their last ones
        self.commands.ask(command)
        self._workers.flush()
        self._workers.close()

    @signals_deferred
    def salvage(self) -> None:
        """After a failure, before :meth:`abort`: bring weights and states of optimizers here.

        So a script that catches the error has the trained weights in the module, as on one device,
        and the states for a checkpoint. If workers cannot be asked any more, nothing happens.
        """
        if not (self._workers.ranks and self._workers.in_step):
            return
        if self._networks:
            # a worker answers every question with its first failure, until it is told to forget it
            self.commands.tell(protocol.ForgetFailure())
            self.bring_all()
        if not self._lost:
            self.optimizers.gather_states()

    def abort(self, failure: Failure) -> None:
        """Tell the ranks that still run that this one has failed, and why; send no heartbeats."""
        self._workers.close(failed=True)
        self._mesh.say_goodbye(failure)

    def close(self) -> None:
        """Write the trace, and make ordinary parameters and optimizers of those of the run.

        A read of a weight of a worker that was not brought here is then an error.
        """
        self._trace.write()
        self.remote.close()
        for name, tensor in self._lost.items():
            give_up(tensor, name)
        self.optimizers.close()
        self._replicated.close()
