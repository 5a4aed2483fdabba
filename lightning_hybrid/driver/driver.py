"""The driver: it runs the user's code, owns the last stage, and drives the workers of its replica.

(Under a free placement it may own earlier stages too.)

The code around it works with its parts: :class:`Distribution` of stages, :class:`Weights`,
:class:`ReplicaGradients`, :class:`DrivenOptimizers`, and the proxies of what the workers own
(:class:`RemoteTensors`). They share the commands to the workers; the driver itself begins and ends
things: networks, steps, runs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn

from lightning_hybrid._torch.autograd import outside_of_transforms
from lightning_hybrid.comm import (
    Failure,
    Mesh,
    broadcast_object,
    copies_of,
    gather_objects,
    meet,
    protocol,
    signals_deferred,
)
from lightning_hybrid.comm.protocol import Placement
from lightning_hybrid.driver.after_run import AfterRun
from lightning_hybrid.driver.chosen_gradients import ChosenGradients
from lightning_hybrid.driver.commands import Commands, Workers
from lightning_hybrid.driver.distribution import Distributed, Distribution
from lightning_hybrid.driver.driven_network import DrivenNetwork, PartsOfDriver
from lightning_hybrid.driver.driven_optimizers import ALL, DrivenOptimizers
from lightning_hybrid.driver.held_hooks import HeldHooks
from lightning_hybrid.driver.network_options import DriverOptions
from lightning_hybrid.driver.ownership import Ownership, Unsettled
from lightning_hybrid.driver.step_calls import StepCalls
from lightning_hybrid.driver.streamed_calls import Batches
from lightning_hybrid.driver.tied_weights import Borrowing, Copied
from lightning_hybrid.driver.weights import FilesOfWorkers, Replicated, Weights
from lightning_hybrid.driver.when_to_average import ReplicaGradients
from lightning_hybrid.errors import HybridError
from lightning_hybrid.graph import StageCode
from lightning_hybrid.remote import RemoteTensors, View, is_deferred, materialize, views_of
from lightning_hybrid.schedules import STREAMED
from lightning_hybrid.stage import (
    ReplicaGroup,
    Stopwatch,
    Trace,
    state_buffers,
    tensors_of,
)
from lightning_hybrid.state import (
    Divided,
    Shard,
    await_shard,
    finish,
    share_optimizers,
    staged,
    write_rest,
    write_shard,
)


class Driver:
    """Drives one replica through one run.

    Args:
        module: the LightningModule.
        mesh: the groups.
        device: the driver's own.
        options: what the run has decided.
        watch: adds up the time in which this rank computes.
        batches: that it is trained on, as far as later ones are known.

    Attributes:
        device: the driver's own.
        commands: to the workers.
        distribution: gives all ranks their stages.
        remote: what the workers own, as the user's code sees it.
        weights: of all stages.
        gradients: likewise.
        chosen_gradients: runs backward passes.
        optimizers: the user's.
        calls: of networks in this step.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        device: torch.device,
        options: DriverOptions,
        watch: Stopwatch | None = None,
        batches: Batches | None = None,
    ) -> None:
        here = mesh.coordinates
        self._module, self._mesh, self.device, self._options = module, mesh, device, options
        self._share_optimizers = False
        self._apart: frozenset[str] = frozenset()  # what stays with its owners after the run
        self._trace = Trace(here.rank, str(here), watch)
        self._networks: list[DrivenNetwork] = []
        known = frozenset(tensors_of(module) if options.shared is None else options.shared)
        self._names = {id(p): name for name, p in module.named_parameters() if name in known}
        # made in the order of who needs whom: proxies ask the ownership, commands
        # flush the proxies, and all that follows only sends commands
        self._workers, unsettled = Workers(mesh), Unsettled()
        self._ownership = Ownership(self._workers, unsettled)
        self.remote = RemoteTensors(self._ownership, device)
        self.commands = Commands(self._workers, self.remote)
        files = FilesOfWorkers(self.commands, options.folder)
        self._borrowing = Borrowing(self.commands, self._ownership, unsettled)
        self._replicated = Replicated(module, mesh.data_parallel, device, self._trace)
        self.calls = StepCalls(options.seed, here.dp_rank, device, follows=options.follows)
        self.distribution = Distribution(module, mesh, options, self.commands, self._trace)
        self.weights = Weights(
            *(module, known, here, self.commands, self._ownership, self._borrowing),
            *(self._replicated, files),
        )
        self.gradients = ReplicaGradients(
            self.commands, self._borrowing, self._replicated, self.calls, unsettled
        )
        self.optimizers = DrivenOptimizers(
            *(module, self._names, mesh, self.commands, self._ownership, self.gradients, files),
            say=options.say,
            shards=options.shards,
        )
        self._shards = options.shards and here.replicas > 1
        hooks = HeldHooks(self._networks, self.commands, self.gradients.settle)
        self.chosen_gradients = ChosenGradients(self._networks, self.gradients, hooks)
        # (buffers that no training step reads need not be the same on all replicas in training)
        self._has_state = here.replicas > 1 and bool(state_buffers(module))
        self._synchronized = True  # in the last step
        self._after = AfterRun(module, self.commands, self.weights, files)
        self._parts = PartsOfDriver(
            *(self.commands, self.weights, self.gradients, self.calls),
            *(batches or Batches(), options.say),
        )

    def __deepcopy__(self, memo: object) -> "Driver":
        """Copies of a Trainer, and of what it has patched, drive the same workers."""
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
        continues: bool,
    ) -> DrivenNetwork:
        """Give every rank of the replica its stages of a network that has been cut.

        Args:
            name: dotted name of the network in the LightningModule.
            network: the module.
            codes: its stages.
            placement: where they go.
            continues: whether the code around a call draws random numbers of the same stream.

        Raises:
            Exception: see :meth:`Distribution.distribute`.
        """
        # views are looked for before weights are sent: a message on its way shows their memory, too
        number, views = len(self._networks), views_of(network)
        made = self.distribution.distribute(number, name, network, codes, placement)
        driven = DrivenNetwork(
            *(number, name, network, made.engine, made.borrowed[0], placement, self._parts),
            continues=continues,
        )
        if placement.schedule in STREAMED:
            self.optimizers.streamed_by = placement.schedule
            # of an exact schedule nothing is under way then, unless a window has become shorter
            if not STREAMED[placement.schedule].delayed:
                self.optimizers.before_step = self.interrupt
        self._take_charge(driven, made, views)
        self._workers.before_weights_change = self.interrupt
        return driven

    @property
    def has_networks(self) -> bool:
        """Whether a network is cut."""
        return bool(self._networks)

    @signals_deferred
    def interrupt(self) -> None:
        """Give up calls that run ahead: what follows is for weights and networks as they are."""
        for network in self._networks:
            if network.stream is not None:
                network.stream.drop()

    def have_here(self, module: nn.Module, *, whole: bool = False) -> None:
        """Bring a module to the device of this rank, which runs its Python.

        Args:
            module: of which the parts that are cut stay where they are.
            whole: with all of its parts, else what it owns itself.

        Raises:
            HybridError: the device has no room for it.
        """
        tensors = (*module.parameters(recurse=whole), *module.buffers(recurse=whole))
        materialize(tensors)
        try:
            with outside_of_transforms(), torch.inference_mode(False):  # (of an evaluation)
                gradients = (tensor.grad for tensor in tensors if tensor.grad is not None)
                for tensor in (*tensors, *gradients):
                    # (through `data`: the same leaf, which has its hooks and its optimizer, and the
                    # same buffer, which a call that has begun may have taken already)
                    if tensor.device != self.device:
                        tensor.data = tensor.data.to(self.device)
        except torch.OutOfMemoryError as error:
            size = sum(tensor.nbytes for tensor in tensors) / 1e9
            raise HybridError(
                f"{type(module).__name__}, {size:.2f} GB, has no room on {self.device}, where it "
                "is computed as a whole as long as it is not cut. Is that for an evaluation "
                "before the training? Then leave it out: Trainer(num_sanity_val_steps=0), or in a "
                "loop of your own."
            ) from error

    def keep(self, module: nn.Module) -> None:
        """Take in a network that is not cut."""
        self.have_here(module, whole=True)
        self._replicated.renew_rest()
        if self._options.share:
            self._replicated.rest.broadcast_weights()

    def settle(self) -> None:
        """No network will be cut: treat all parameters as the driver's own."""
        self._replicated.settle()
        self.optimizers.stay_here()

    def expect_optimizers(self) -> None:
        """Only replica 0 has loaded the state of optimizers."""
        self._share_optimizers = self._options.share

    def _take_charge(self, driven: DrivenNetwork, made: Distributed, views: Sequence[View]) -> None:
        """All ranks have their stages: tell the parts of the driver whose tensors are where."""
        first, replica_group = not self._networks, driven.engine.replica_group
        self._networks.append(driven)
        copied = self._copied(driven)
        # before optimizers are shipped: of what no rank owns no state goes anywhere
        self._ownership.add(driven.number, made.remote, copied)
        self._replicated.add(replica_group, driven.full_names(driven.owned_names))
        self.optimizers.ship(fresh=ALL if first else 0)
        tensors = tensors_of(self._module)
        owned_there = (name for names in made.remote.values() for name in names)
        stages = [own.specializations[0] for own in driven.engine.owned]
        used_here = driven.full_names(name for stage in stages for name in stage.buffer_names)
        proxies = (name for name in owned_there if not is_deferred(tensors[name]))
        self.remote.add(self._module, proxies, used_here, views)
        self._borrowing.add([driven.full_names(sorted(names)) for names in made.borrowed])
        if self._options.trains:
            self._workers.flush()  # what is on its way shows the memory of weights
            self.remote.vacate(self._borrowing.used_here)
        if self._options.share:
            self._share_from_replica_0(driven.number, replica_group)

    def _copied(self, driven: DrivenNetwork) -> dict[str, nn.Parameter]:
        """By name in the LightningModule the parameters of this rank's copy of a stage, if any."""
        if not driven.placement.collects:
            return {}
        copy = driven.engine.owned[0]
        [owner, *_] = copies_of(driven.placement.devices[copy.number])
        named = dict(copy.specializations[0].named_parameters())
        copied = dict(zip(driven.full_names(named), named.values()))
        self._borrowing.add_copy(
            Copied(driven.number, owner, copied.keys(), driven.engine.replica_group)
        )
        return copied

    def _share_from_replica_0(self, network: int, replica_group: ReplicaGroup) -> None:
        """Weights were loaded, or made, in one replica only."""
        # workers are told first: each rank broadcasts among those with its stages, all at once
        self.commands.tell(protocol.Share(network, self._share_optimizers))
        replica_group.broadcast_weights()
        self._replicated.rest.broadcast_weights()
        if self._share_optimizers:
            optimizers, group = self.optimizers.optimizers, self._mesh.data_parallel
            share_optimizers(optimizers, self._names, group, self.device)

    # ------------------------------------------------------------------ a step

    def begin_step(self, batch: int, *, whole: bool = True) -> None:
        """A `training_step` begins: count its calls of networks anew.

        Args:
            batch: how many training batches the run has seen before.
            whole: whether nothing that was computed before is part of it.
        """
        self.calls.begin(batch)
        if whole:
            self.remote.begin_step()
        if self._has_state and self._synchronized:
            self.weights.broadcast_buffers(state=True)
        # (with manual optimization DDP takes each step for one that exchanges nothing)
        by_itself = getattr(self._module, "automatic_optimization", True)
        self._synchronized = self.gradients.synchronize and by_itself

    @signals_deferred
    def check(self) -> None:
        """See to it that no stage of any replica has failed (collective over the drivers).

        A stage that fails in a backward keeps its appointments, so that its driver hears of it
        only with the next question; until then the other replicas train on with what it sent.
        Nothing may leave the replicas, into a checkpoint or at the end of a fit, before this.

        Raises:
            Exception: of the first that has.
        """
        failure = None
        try:
            self.commands.ask(protocol.Check())
        except Exception as error:
            failure = error
        # asked also where nothing has failed: the drivers of the other replicas wait in it
        if not meet(self._mesh.drivers, failed=failure is not None):
            raise failure or self._options.first_failure()

    @signals_deferred
    def save_shards(self, checkpoint: Mapping[str, Any], folder: Path) -> None:
        """Write a sharded checkpoint: each rank of this replica what it owns.

        Where states are divided, all drivers call this together.

        Args:
            checkpoint: the ordinary one; of workers it has tensors that are not read here. Only
                replica 0's is written.
            folder: empty; all ranks see it. Likewise.

        Raises:
            OSError: of any rank, which cannot write.
        """
        divided = Divided.of(checkpoint)
        if not self._shards:
            written = self._write(divided, divided.elsewhere, folder)
        else:
            # only replica 0 has made the checkpoint, and so knows what each rank is to write
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
        self, divided: Divided, elsewhere: Mapping[int, Any], folder: Path
    ) -> list[Shard | OSError]:
        """What this replica writes, rank by rank."""
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
        finally:  # they answer in any case
            answers = self._workers.hear(parts)
        return written + [answer.value for answer in answers]

    @signals_deferred
    def stage_shards(
        self, checkpoint: Mapping[str, Any], folder: Path, given_up: Event
    ) -> Callable[[], None]:
        """Make copies for a sharded checkpoint, on each rank of what it owns; workers write theirs.

        Args:
            checkpoint: as above.
            folder: likewise.
            given_up: is set where workers may be gone.

        Returns:
            What writes this rank's, and makes a checkpoint of it, in any thread.
        """
        divided = Divided.of(checkpoint)
        self._tell_shards(divided.elsewhere, folder, staged=True)
        try:
            write_rest(folder, divided.rest)
            here = staged(divided.here)
        finally:
            # in any case: an answer that nobody takes would be taken for that of the next question
            self._workers.hear(divided.elsewhere)

        def write() -> None:
            shards = [write_shard(folder, 0, here)]
            shards += [await_shard(folder, rank, given_up) for rank in divided.elsewhere]
            finish(folder, shards)

        return write

    def await_shards(self) -> None:
        """Wait until workers have written what was staged."""
        self.commands.ask(protocol.AwaitShards())

    def _tell_shards(self, parts: Mapping[int, Any], folder: Path, *, staged: bool) -> None:
        self.commands.tell_each(
            {rank: protocol.SaveShard(str(folder), part, staged) for rank, part in parts.items()}
        )

    @signals_deferred
    def reports(self, name: str) -> list[Any]:
        """What each worker, in the order of their stages, answers to a question of this name."""
        return [answer.value for answer in self.commands.ask(protocol.Report(name))]

    # ------------------------------------------------------------------ the end

    @signals_deferred
    def bring_all(self) -> None:
        """Have the weights, buffers and gradients of all stages in the module.

        Where files of workers cannot be read, they travel, if all ranks have room for them. Else
        each rank keeps what it owns, and the user is told.
        """
        self._ownership.settle()
        if self._after.map_tensors():
            return
        if lacking := self._after.lacking(self.device, self.optimizers.optimizers):
            self._options.say(lacking)
            self._apart = self._parameters_of_stages()
        self.weights.gather(but=self._apart)
        if not self._apart:
            self.remote.bring_gradients()

    def _parameters_of_stages(self) -> frozenset[str]:
        here = {name for n in self._networks for name in n.full_names(n.owned_names)}
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        return frozenset((here | self._ownership.network_of.keys()) & parameters)

    @signals_deferred
    def end(self, results: Any, *, weights: bool) -> None:
        """End the run: the workers get the results and, if weights have changed, the whole module.

        Of the optimizers they get the groups, and keep the states that they have; this rank gets
        those of all.

        Raises:
            Exception: of a worker that has failed since it was last heard of.
        """
        if weights and self._workers.ranks:
            if not self._after.hand_out():
                self.weights.hand_out(but=self._apart)
            # also where no network was cut: scripts read groups of optimizers on each rank
            self.optimizers.ship_in_any_case(fresh=0)
        # an evaluation after a fit has given them away, too
        self.optimizers.bring_states()
        # asked, and not told: a worker that has failed since its last answer says so here
        self.commands.ask(protocol.End(results))
        self._workers.flush()
        self._workers.close()

    @signals_deferred
    def salvage(self) -> None:
        """Before :meth:`abort`: have the weights of all stages in the module, here and on workers.

        A script that catches the error finds there what its training has made, as on one device;
        here also the states of the optimizers, for a checkpoint.
        """
        if not (self._workers.ranks and self._workers.in_step):
            return
        if self._networks:
            # a worker answers every question with its first failure, until it is told to forget it
            self.commands.tell(protocol.ForgetFailure())
            self.bring_all()
        if not self._after.hand_out():
            self.weights.hand_out(but=self._apart)
        if not self._apart:
            self.optimizers.gather_states()

    def abort(self, failure: Failure) -> None:
        """Tell the workers that this replica has failed: all that are still there."""
        self._workers.close(failed=True)
        self._mesh.say_goodbye(failure)

    def close(self) -> None:
        """Leave the optimizers and the parameters as they were."""
        self._trace.write()
        self.remote.close()
        self.optimizers.close()
        self._replicated.close()
