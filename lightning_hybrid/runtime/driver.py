"""The driver: it runs the user's code, owns the last stage, and drives the workers of its replica.

(Under a free placement it may own earlier stages too.)

The code around it works with its parts: :class:`Weights`, :class:`ReplicaGradients`,
:class:`DrivenOptimizers`, and the proxies of what the workers own (:class:`RemoteTensors`). They
share the commands to the workers; the driver itself begins and ends things: networks, steps, runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_hybrid.comm.collectives import meet
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.links import Links, link_stages
from lightning_hybrid.comm.mesh import Mesh
from lightning_hybrid.comm.protocol import (
    Check,
    Command,
    Cut,
    End,
    ForgetFailure,
    Report,
    Share,
    TakeWeights,
)
from lightning_hybrid.comm.signals import signals_deferred
from lightning_hybrid.errors import NetworkError
from lightning_hybrid.network import NetworkGraph, Stage, StageCode, make_stages
from lightning_hybrid.network.deferred import is_unmade, make
from lightning_hybrid.runtime.borrowing import Borrowing
from lightning_hybrid.runtime.commands import Commands, Workers
from lightning_hybrid.runtime.driven_optimizers import ALL, DrivenOptimizers
from lightning_hybrid.runtime.engine import Engine, StageOptions
from lightning_hybrid.runtime.faults import read_fault
from lightning_hybrid.runtime.gradients import ReplicaGradients
from lightning_hybrid.runtime.large import (
    Claim,
    leave_to_worker,
    refuse_tied,
    share_optimizers,
    to_send,
)
from lightning_hybrid.runtime.network_call import DrivenNetwork, Placement, Specialization
from lightning_hybrid.runtime.ownership import Ownership
from lightning_hybrid.runtime.performance import Stopwatch
from lightning_hybrid.runtime.remote import RemoteTensors
from lightning_hybrid.runtime.replicas import Copies, state_buffers
from lightning_hybrid.runtime.replicated import Replicated
from lightning_hybrid.runtime.staged import (
    borrowed_parameters,
    own_buffers,
    own_parameters,
    tensors_of,
)
from lightning_hybrid.runtime.step_calls import StepCalls
from lightning_hybrid.runtime.trace import Trace
from lightning_hybrid.runtime.unsettled import Unsettled
from lightning_hybrid.runtime.weights import Weights


class Driver:
    """Drives one replica through one run.

    Args:
        module: the LightningModule.
        mesh: the groups.
        device: the driver's own.
        seed: of the random numbers inside networks.
        options: how stages compute.
        watch: adds up the time in which this rank computes.
        share: whether replicas may differ in weights that are not made yet, so that those of
            replica 0 must travel.
        say: tells the user something, in one line.

    Attributes:
        device: the driver's own.
        commands: to the workers.
        remote: what the workers own, as the user's code sees it.
        weights: of all stages.
        gradients: likewise.
        optimizers: the user's.
        calls: of networks in this step.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        device: torch.device,
        seed: int,
        options: StageOptions,
        watch: Stopwatch | None = None,
        *,
        share: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        here = mesh.coordinates
        self._module, self._mesh, self.device, self._seed = module, mesh, device, seed
        self._options, self._share, self._share_optimizers = options, share, False
        self._trace = Trace(here.rank, str(here), watch)
        self._networks: list[DrivenNetwork] = []
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._workers, unsettled = Workers(mesh), Unsettled()
        self._ownership = Ownership(self._workers, unsettled)
        self.remote = RemoteTensors(self._ownership)
        self.commands = Commands(self._workers, self.remote)
        self._borrowing = Borrowing(self.commands, self._ownership, unsettled)
        self._replicated = Replicated(module, mesh.data_parallel, device, self._trace)
        self.calls = StepCalls(seed, here.dp_rank, device)
        self.weights = Weights(
            module, here, self.commands, self._ownership, self._borrowing, self._replicated
        )
        self.gradients = ReplicaGradients(
            self.commands, self._borrowing, self._replicated, self.calls, unsettled
        )
        self.optimizers = DrivenOptimizers(
            module, self._names, device, self.commands, self._ownership, self.gradients, say
        )
        self._has_state = here.replicas > 1 and bool(state_buffers(module))
        self._synchronized = True  # in the last step

    def __deepcopy__(self, memo: object) -> "Driver":
        """Copies of a Trainer, and of what it has patched, drive the same workers."""
        return self

    # ------------------------------------------------------------------ networks

    @signals_deferred
    def add_network(
        self,
        name: str,
        network: nn.Module,
        graph: NetworkGraph,
        codes: Sequence[StageCode],
        *,
        devices: Sequence[int],
        parts: int,
        schedule: str,
        continues: bool,
    ) -> Specialization:
        """Give every rank of the replica its stages of a network that has been cut.

        Args:
            name: dotted name of the network in the LightningModule.
            network: the module.
            graph: its graph.
            codes: its stages.
            devices: ``pp_rank`` of each stage; the last one is 0, this rank.
            parts: into how many slices a batch is split in calls of this graph.
            schedule: name of the schedule.
            continues: whether the code around a call draws random numbers of the same stream.

        Returns:
            The network, called by this graph.

        Raises:
            NetworkError: code of a stage cannot travel to its rank.
            Exception: of a worker that cannot make its stages.
            DeferredError: stages share a weight that is made in ``configure_model``.
        """
        owned = tuple([frozenset(code.owned) for code in codes])
        placement = Placement(tuple(devices), owned, schedule)
        number = len(self._networks)
        parameters = dict(network.named_parameters())
        borrowed = borrowed_parameters(
            [[n for n in code.owned if n in parameters] for code in codes], devices
        )
        refuse_tied(name, tensors_of(self._module), borrowed)
        self._refuse_compiled(name, borrowed[0])
        links = self._order_cut(number, name, codes, placement, borrowed)
        prefix = f"{name}." if name else ""
        remote = self._hand_out_weights(prefix, codes, devices, borrowed)
        engine = self._make_engine(prefix, network, codes, placement, links, borrowed[0])
        driven = DrivenNetwork(
            number,
            name,
            network,
            engine,
            borrowed[0],
            placement,
            continues=continues,
            commands=self.commands,
            weights=self.weights,
            gradients=self.gradients,
            calls=self.calls,
        )
        self._take_charge(driven, prefix, remote, borrowed)
        return driven.specialize(graph, parts)

    def add_specialization(
        self, network: DrivenNetwork, graph: NetworkGraph, codes: Sequence[StageCode], parts: int
    ) -> Specialization:
        """Give every rank of the replica its stages of another graph of the same network.

        Args:
            network: the network.
            graph: the graph.
            codes: its stages; each uses tensors that its rank has.
            parts: into how many micro-batches a batch may be split.
        """
        nobody = [frozenset[str]() for _ in (0, *self._workers.ranks)]
        self._order_cut(network.number, network.name, codes, network.placement, nobody)
        here = [own.number for own in network.engine.owned]
        stages = make_stages([codes[n] for n in here], network.module, self.device)
        network.engine.add_variant(dict(zip(here, stages)))
        return network.specialize(graph, parts)

    def keep(self, module: nn.Module) -> None:
        """Take in a network that is not cut."""
        make((*module.parameters(), *module.buffers()))
        module.to(self.device)
        self._replicated.renew_rest()
        if self._share:
            self._replicated.rest.broadcast_weights()

    def settle(self) -> None:
        """No network is cut: all that waited for one is the driver's own."""
        self._replicated.settle()

    def expect_optimizers(self) -> None:
        """Only replica 0 has loaded the state of optimizers."""
        self._share_optimizers = self._share

    def _refuse_compiled(self, name: str, borrowed: Iterable[str]) -> None:
        for parameter in borrowed if self._options.compiled else ():
            raise NetworkError(
                f"compile_stages=True: the driver's stage of network {name!r} shares {parameter!r} "
                "with that of another rank, and torch.compile would not hear of its changes. Cut "
                "elsewhere (HybridGabraStrategy(allocation=[...])), or leave compile_stages out."
            )

    @signals_deferred
    def _order_cut(
        self,
        number: int,
        name: str,
        codes: Sequence[StageCode],
        placement: Placement,
        borrowed: Sequence[frozenset[str]],
    ) -> dict[int, Links]:
        """Have the workers make their stages. Returns the links of those that are here, if new."""
        for code in codes:
            code.code.check()
        orders: dict[int, Command] = {}
        for worker in self._workers.ranks:
            theirs = {n: codes[n] for n, rank in enumerate(placement.devices) if rank == worker}
            orders[worker] = Cut(
                number,
                name,
                theirs,
                placement.devices,
                borrowed[worker],
                placement.schedule,
                self._seed,
            )
        self.commands.tell_each(orders)
        links = {}
        if number == len(self._networks):
            links = link_stages(self._mesh, placement.devices, self.device)
        self._workers.hear(self._workers.ranks)
        return links

    def _hand_out_weights(
        self,
        prefix: str,
        codes: Sequence[StageCode],
        devices: Sequence[int],
        borrowed: Sequence[frozenset[str]],
    ) -> dict[int, tuple[str, ...]]:
        """Send each worker the weights of its stages.

        Returns:
            By ``pp_rank`` of the worker, names in the LightningModule of what it owns.
        """
        tensors = tensors_of(self._module)
        remote: dict[int, tuple[str, ...]] = {}
        for worker in self._workers.ranks:
            theirs = [code for code, device in zip(codes, devices) if device == worker]
            names = {n: prefix + n for code in theirs for n in code.owned}
            values = to_send(tensors, names.values())
            self._workers.send(worker, TakeWeights(values.items()))
            lent = borrowed[worker]
            remote[worker] = tuple(full for n, full in names.items() if n not in lent)
            leave_to_worker(tensors, remote[worker], self._mesh.coordinates, worker)
        return remote

    def _make_engine(
        self,
        prefix: str,
        network: nn.Module,
        codes: Sequence[StageCode],
        placement: Placement,
        links: Mapping[int, Links],
        borrowed: frozenset[str],
    ) -> Engine:
        """This rank's stages, on its device."""
        stages = dict(zip(links, make_stages([codes[n] for n in links], network, self.device)))
        here: list[Stage] = [*stages.values()]
        mine = [prefix + n for part in here for n in part.tensor_names]
        Claim(self._module, mine, (), self._mesh.coordinates).settle(())
        for part in here:
            part.move(self.device)
        copies = Copies(
            own_parameters(here, borrowed),
            partial(own_buffers, here),
            self._mesh.data_parallel,
            self._trace,
            partial(state_buffers, network),
        )
        return Engine(
            stages,
            placement.devices,
            self._mesh.coordinates,
            links,
            copies,
            self.device,
            placement.schedule,
            self._seed,
            self._trace,
            self._options,
        )

    def _take_charge(
        self,
        driven: DrivenNetwork,
        prefix: str,
        remote: Mapping[int, Sequence[str]],
        borrowed: Sequence[frozenset[str]],
    ) -> None:
        """All ranks have their stages: tell the parts of the driver whose tensors are where."""
        first, copies = not self._networks, driven.engine.copies
        self._networks.append(driven)
        self._ownership.add(driven.number, remote)
        self._replicated.add(copies, [prefix + name for name in driven.owned_names])
        self.optimizers.ship(fresh=ALL if first else 0)
        tensors = tensors_of(self._module)
        owned_there = (name for names in remote.values() for name in names)
        stages = [own.variants[0] for own in driven.engine.owned]
        used_here = [prefix + name for stage in stages for name in stage.buffer_names]
        proxies = (name for name in owned_there if not is_unmade(tensors[name]))
        self.remote.add(self._module, proxies, used_here)
        self._borrowing.add([[prefix + n for n in sorted(names)] for names in borrowed])
        if self._share:
            self._share_from_replica_0(driven.number, copies)

    def _share_from_replica_0(self, network: int, copies: Copies) -> None:
        """Weights were loaded, or made, in one replica only."""
        self.commands.tell(Share(network, self._share_optimizers))
        copies.broadcast_weights()
        self._replicated.rest.broadcast_weights()
        if self._share_optimizers:
            optimizers, group = self.optimizers.optimizers, self._mesh.data_parallel
            share_optimizers(optimizers, self._names, group, self.device)

    # ------------------------------------------------------------------ a step

    def begin_step(self, batch: int) -> None:
        """A `training_step` begins: count its calls of networks anew.

        Args:
            batch: how many training batches the run has seen before.
        """
        self.calls.begin(batch)
        self.remote.begin_step()
        if self._has_state and self._synchronized:
            self.weights.broadcast_buffers(state=True)
        self._synchronized = self.gradients.synchronize

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
            self.commands.ask(Check())
        except Exception as error:
            failure = error
        assert self._mesh.drivers is not None
        if not meet(self._mesh.drivers, failed=failure is not None):
            raise failure or read_fault(self._mesh).exception()

    @signals_deferred
    def reports(self, name: str) -> list[Any]:
        """What each worker, in the order of their stages, answers to a question of this name."""
        return [answer.value for answer in self.commands.ask(Report(name))]

    # ------------------------------------------------------------------ the end

    @signals_deferred
    def end(self, results: Any, *, weights: bool) -> None:
        """End the run: the workers get the results and, after a fit, the whole module.

        Of the optimizers they get the groups; the states stay where they are.

        Raises:
            Exception: of a worker that has failed since it was last heard of.
        """
        if weights and self._workers.ranks:
            self.weights.hand_out_all()
            self.optimizers.ship_in_any_case(fresh=0)
        self.commands.ask(End(results))
        self._workers.flush()
        self._workers.close()

    @signals_deferred
    def salvage(self) -> None:
        """Before :meth:`abort`: have the weights of all stages in the module, here and on workers.

        A script that catches the error finds there what its training has made, as on one device.
        """
        if self._networks:
            self.commands.tell(ForgetFailure())
            self.weights.gather()
            self.weights.hand_out_all()

    def abort(self, failure: Failure) -> None:
        """Tell the workers that this replica has failed: all that are still there."""
        self._workers.close()
        self._mesh.say_goodbye(failure)

    def close(self) -> None:
        """Leave the optimizers and the parameters as they were."""
        self._trace.write()
        self.remote.close()
        self.optimizers.close()
        self._replicated.close()
