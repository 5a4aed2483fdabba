"""Where this process stands: among all that were launched, in the mesh, and among the replicas.

Lightning and scripts are told of a world like that of DDP over the drivers, one per replica; see
:mod:`lightning_hybrid.run.replica_world`.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from subprocess import Popen
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid._lightning import (
    ClusterEnvironment,
    TorchElasticEnvironment,
    rank_zero_info,
    reset_seed,
)
from lightning_hybrid._lightning_private import set_rank_of_messages
from lightning_hybrid.comm import (
    Coordinates,
    Group,
    Survivors,
    backend_on,
    choose_interface,
)
from lightning_hybrid.config import Config
from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.planning import Cluster, Machine
from lightning_hybrid.process import (
    Children,
    Choice,
    EndOrder,
    History,
    JoinOrder,
    LateWorld,
    Meeting,
    NoWorld,
    Order,
    Phase,
    Servers,
    World,
    cluster_of,
    drop_group,
    drop_what_driver_lacks,
    end_servers,
    give,
    has_met,
    history,
    join,
    latest_order,
    look_around,
    orders,
    reach,
    store_of_all,
    wait_for_late_drivers,
)
from lightning_hybrid.run import LauncherRanks, ReplicaWorld, ShownRanks, asked_by_framework
from lightning_hybrid.worker import Server, serve_here

T = TypeVar("T")


class StrategyRanks:
    """The ranks, sizes and devices of a strategy on this process, before, in and between its runs.

    Args:
        config: what the user has asked for.
        reseeds: whether the drivers set their random generators to the same seed when they join a
            mesh of several replicas.

    Attributes:
        config: the same, with sizes once they are chosen.
        devices: the devices of all processes of this host, by local rank; ``None``: no Trainer or
            Fabric has set them.
        hosts: number of hosts.
        world: all ranks; a `NoWorld` until this process has met them.
        machine: the devices of all ranks, as they were surveyed for the choice of sizes; ``None``:
            none were to be chosen so far.
        launched: the numbers that the launcher has given this process.
        told_replicas: number of replicas that the user's code was told before it was chosen;
            ``None``: it was told none.
        asked_for: the attribute by which the user's code has asked for it.
    """

    def __init__(self, config: Config, *, reseeds: bool = True) -> None:
        self.config = config
        self._reseeds = reseeds
        self.devices: list[torch.device] | None = None
        self.hosts = 1
        self.world: World | NoWorld = NoWorld()
        self.machine: Machine | None = None
        self.launched = LauncherRanks()
        self._shown = ShownRanks()
        self.told_replicas: int | None = None
        self.asked_for = ""
        self._meeting: Meeting | None = None
        self._latest_order = 0
        self._environment: ClusterEnvironment | None = None
        self._backend = ""
        self._timeout = timedelta()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without process groups: a Trainer may spawn processes."""
        return vars(self) | {"world": NoWorld()}

    # ------------------------------------------------------------------ all processes

    @property
    def per_host(self) -> int:
        """Number of processes of each host, one per device."""
        return len(self.devices or ())

    @property
    def shape(self) -> tuple[int, int]:
        """The number of replicas, and the number of devices of a replica."""
        return self.config.shape(self.hosts, self.per_host)

    @property
    def replicas(self) -> int:
        """Number of replicas, lost ones included."""
        return self.shape[0]

    @property
    def survivors(self) -> Survivors | None:
        """The replicas that are left, in a run that goes on when one is lost; else ``None``."""
        world = self.world
        return world.mesh.survivors if isinstance(world, World) and world.has_coordinates else None

    @property
    def living(self) -> int:
        """Number of replicas that are left, over which the data is divided."""
        return self.replicas if self.survivors is None else len(self.survivors.living)

    @property
    def global_rank(self) -> int:
        """The rank that Lightning is told; for a driver its number among those that are left."""
        here, survivors = self.coordinates, self.survivors
        if survivors is None or not here.is_driver:
            return here.lightning_rank
        return survivors.living.index(here.dp_rank)

    @property
    def stages(self) -> int:
        """Number of devices of a replica."""
        return self.shape[1]

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank in the mesh; before it has met the others, default ones."""
        if isinstance(self.world, World):  # ranks may have got others
            return self.world.coordinates
        return self._coordinates_at(self.launched.rank)

    def coordinates_of(self, local_rank: int) -> Coordinates:
        """Coordinates that a process of this host has in the default order; see `_coordinates_at`.

        Args:
            local_rank: number of the process on this host.
        """
        return self._coordinates_at(self.launched.node_rank * self.per_host + local_rank)

    def _coordinates_at(self, rank: int) -> Coordinates:
        """Coordinates that a process has in the default order, from `shape` and the config alone.

        The ranks may be ordered otherwise when the devices have been surveyed, or by a plan
        (`Coordinates.order`).

        Args:
            rank: global rank of the process.
        """
        return Coordinates(rank, *self.shape, free=self.config.several_stages_per_device)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return given(self.devices, "parallel_devices")[self.launched.local_rank]

    # ------------------------------------------------------------------ replicas

    @property
    def replica_world(self) -> ReplicaWorld:
        """The ranks and sizes that Lightning and scripts are told on this process."""
        return ReplicaWorld.of(self.coordinates, self.launched, self.hosts, self.per_host)

    def note_asked(self, what: str) -> None:
        """Note that code asks for a size that follows from the number of replicas.

        If the user's code asks before this number is chosen, it is kept: what was made of the
        answer must stay true (:attr:`told_replicas`). Otherwise nothing is noted.

        Args:
            what: the attribute that is asked for, such as ``trainer.world_size``.
        """
        is_open = self.sizes_are_open and not self.world.has_coordinates
        if is_open and self.world.phase is not Phase.CHOOSING and not asked_by_framework():
            self.told_replicas = self.replicas
            self.asked_for = what

    def set_launched(self, environment: ClusterEnvironment | None) -> None:
        """Take the numbers of this process from the launcher's environment.

        Environment variables that were changed for a run get the launcher's values again before.

        Args:
            environment: Lightning's cluster environment; ``None``: this is the only process.
        """
        self._environment = environment
        self._shown.restore()
        self.launched = LauncherRanks.by(environment, self.per_host)
        self._number(self.launched.rank, self.hosts * self.per_host)

    def _number(self, rank: int, size: int) -> None:
        """Set rank and size in Lightning's cluster environment, where it keeps them itself.

        Also sets whether this process prints what ``rank_zero_info`` is given.

        Args:
            rank: rank that the environment is to return.
            size: number of ranks that it is to return.
        """
        if self._environment is not None:
            self._environment.set_global_rank(rank)
            self._environment.set_world_size(size)
        set_rank_of_messages(self.coordinates.lightning_rank if self.devices else 0)

    def _show(self) -> None:
        """Set the environment variables of ranks and sizes to the world of the replicas.

        They stay so until :meth:`hide` is called.
        """
        world = self.replica_world
        self._shown.show(world.variables)
        self._number(world.rank, world.size)

    def hide(self) -> None:
        """Set the environment variables of ranks and sizes back to the launcher's numbers."""
        self._shown.restore()
        self._number(self.launched.rank, self.hosts * self.per_host)

    # ------------------------------------------------------------------ groups

    @property
    def sizes_are_open(self) -> bool:
        """Whether the user has left both numbers, of replicas and stages, to be chosen."""
        return self.config.leaves_sizes_open(self.hosts * self.per_host)

    @property
    def joined(self) -> World:
        """The ranks of the run, which this process has met.

        Raises:
            HybridError: it has not met them yet.
        """
        if isinstance(self.world, World):
            return self.world
        raise HybridError(
            "This process has not met the other ranks yet; the strategy does so at the start of "
            "trainer.fit, validate, test, predict or fabric.launch. Call this from a hook, in the "
            "function that is launched, or after a run."
        )

    def meet(self, backend: str, timeout: timedelta) -> None:
        """Meet all other ranks when a run starts; join the mesh if sizes are given (collective).

        If they are open, the devices are surveyed, by which sizes are then chosen.

        Rank 0 first orders the servers of this script to come. A default process group of torch
        that exists already is closed. A driver that is started late meets nobody yet.

        Args:
            backend: backend of the process groups.
            timeout: time-out of tensors between ranks.

        Raises:
            PlanError: the launcher has started other processes than the sizes are for, or earlier
                runs have made servers of ranks that are to be drivers.
        """
        self._backend = backend
        self._timeout = timeout
        environment = given(self._environment, "cluster_environment")
        refuse_other_numbers(environment, self.launched, self.hosts, self.per_host)
        # (a script that is started later could not skip a run, which has failed here)
        Servers.lone &= self.sizes_are_open and not has_met()
        if not Servers.lone:
            self._keep_drivers()
        coordinates = self._coordinates_at(self.launched.rank)
        agent_serves = (
            isinstance(environment, TorchElasticEnvironment)
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )
        address, port = environment.main_address, environment.main_port
        choose_interface(address, port, self.hosts)
        serve = coordinates.rank == 0 and not agent_serves
        if dist.is_initialized() and not has_met():
            rank_zero_info(
                "A default group of torch.distributed was made before this run. It is closed, "
                "since in a run the default group is that of the replicas."
            )
        meeting = Meeting(address, port, self.hosts, serve, outlives=agent_serves)
        self._meeting = meeting
        store = self._store
        if self.sizes_are_open and not (has_met() or Servers.lone):
            choice = Choice.found(store)
            if choice is not None:
                self.world = LateWorld(choice, store)
                self._show()
                return
        before = history()
        if coordinates.rank == 0 and Servers.ranks:
            give(store, self._join_order(before, coordinates))
        self.world = World(reach(coordinates, meeting), timeout)
        self.world.begin()
        # (rank 0 gives the next order when all have joined the mesh)
        self._latest_order = latest_order(store)
        if self.sizes_are_open:
            self._show()  # of one chain, so that nobody divides data by all processes
            self.machine = self._look_around(self.world.everyone.world)
            if Servers.lone:
                self.world.phase = Phase.LONE
        else:
            self.take_coordinates()

    def meet_as_chosen(
        self, start_drivers: Callable[[Collection[int]], list["Popen[bytes]"]]
    ) -> None:
        """Meet all ranks again when rank 0, which has run the script alone, has chosen sizes.

        Drivers of other replicas are started, and the servers end whose places they take.

        Args:
            start_drivers: starts the script for these ranks, and returns the processes of the
                servers that had their places.
        """
        world, (replicas, stages) = self.joined, self.shape
        world.stop_watching()
        self.hide()  # (the script is started with the launcher's numbers)
        Servers.lone = False
        late = frozenset(range(stages, replicas * stages, stages))
        if late:
            drop_group()
            Servers.ranks -= late
            Choice(
                sizes=given(self.config.sizes, "sizes"),
                servers=frozenset(Servers.ranks),
                history=history(),
                said=tuple(world.said),
            ).leave(self._store)
            ending = start_drivers(late)
            give(self._store, EndOrder(0, late))
            end_servers(ending)
            processes = {rank: Children.processes[rank - 1] for rank in late}
            wait_for_late_drivers(self._store, processes)
        self.meet(self._backend, self._timeout)

    def meet_late(self, world: LateWorld) -> None:
        """On a driver that is started late, meet the other ranks, with what rank 0 has chosen.

        Args:
            world: what this driver has had of the run so far.
        """
        choice = world.choice
        self.hide()
        self.config = replace(self.config, sizes=choice.sizes)
        Servers.ranks.update(choice.servers)
        drop_what_driver_lacks(choice.history)
        world.come(self.launched.rank)
        self.meet(self._backend, self._timeout)

    def ranks_to_serve(self, *, scripted: bool) -> Collection[int]:
        """Choose the local ranks whose processes are to be servers; may set open sizes.

        If sizes are given, these are all workers. While sizes are open, these are all but rank 0,
        which runs the script alone until sizes are chosen. If the script cannot be started again,
        or there are servers already, open sizes are set to one replica here. With several hosts
        there are no servers: all ranks run the script.

        Args:
            scripted: whether the script can be started again in other processes.
        """
        if self.hosts > 1:
            return ()
        if self.sizes_are_open and (Servers.ranks or not scripted):
            self.config = replace(self.config, data_parallel_size=1)
        Servers.lone = self.sizes_are_open
        here = replace(self._coordinates_at(0), order=self._order_of_plan)
        return [r for r in range(self.per_host) if not replace(here, rank=r).is_driver]

    def _keep_drivers(self) -> None:
        """Check that the ranks which still run the script can be the drivers of this run.

        The others are servers since an earlier run, and cannot be drivers any more. After a first
        run, open sizes are set to as many replicas as there are ranks with the script: one that
        would serve now could not run what follows in it.

        Raises:
            PlanError: this run needs more drivers, or its plan has other ones.
        """
        scripts = [rank for rank in range(self.hosts * self.per_host) if rank not in Servers.ranks]
        if self.sizes_are_open and (Servers.ranks or has_met()):
            self.config = replace(self.config, data_parallel_size=len(scripts))
        planned = self._order_of_plan[:: self.stages]
        if self.replicas > len(scripts) or not Servers.ranks.isdisjoint(planned):
            raise PlanError(
                f"data_parallel_size({self.replicas}): since an earlier run of this script ranks "
                f"{', '.join(map(str, scripts))} alone run it, and the others serve them. Let "
                "the first run have the most replicas, or use a script for each."
            )

    @property
    def _drivers(self) -> tuple[int, ...]:
        """The global ranks that must be drivers, as the others are servers; empty: any may be."""
        size, (replicas, stages) = self.hosts * self.per_host, self.shape
        usual = range(0, size, stages)
        if not Servers.ranks:
            return ()
        if Servers.ranks.isdisjoint(usual):
            return tuple(usual)
        return tuple(rank for rank in range(size) if rank not in Servers.ranks)[:replicas]

    def _join_order(self, before: History, here: Coordinates) -> JoinOrder:
        """Make the order for servers to join the run that this process, rank 0, begins.

        Args:
            before: the groups that this process has from earlier runs.
            here: coordinates of this process.
        """
        devices = given(self.devices, "parallel_devices")
        return JoinOrder(
            history=before,
            coordinates=replace(here, order=self._order_of_plan),
            backend=self._backend,
            timeout=self._timeout,
            devices=tuple(devices),
            surveys=self.config.needs_survey(*self.shape),
            capacity=self.config.capacity,
            lone=Servers.lone,
        )

    @property
    def _store(self) -> dist.Store:
        """The store that this process uses in all its runs; made or reached at the first call."""
        meeting = given(self._meeting, "meeting")
        return store_of_all(meeting, self.launched.rank, self.hosts * self.per_host)

    def serve_if_worker(self, module: nn.Module | None = None, *, for_good: bool) -> None:
        """On a worker, serve from now on and never return; on a driver, note who the servers are.

        Collective: all ranks that run the script call this once they have joined the mesh.

        Args:
            module: the LightningModule of this rank, whose weights a worker frees; ``None``: there
                is none yet.
            for_good: whether workers serve in later runs too. ``False``: their processes were
                started for this run alone, and end with it.
        """
        world = self.joined
        here = world.coordinates
        everyone = range(here.replicas * here.ranks_per_replica)
        workers = [rank for rank in everyone if not replace(here, rank=rank).is_driver]
        Servers.add(workers, self._store, host=here.rank == 0)
        if here.is_driver:
            return
        world.serve()
        local_rank, meeting = self.launched.local_rank, given(self._meeting, "meeting")
        coming = orders(self._store, here.rank, self._latest_order, self._timeout)
        server = Server(here.rank, local_rank, meeting, world)
        serve_here(server, coming if for_good else islice(coming, 1), module)

    def give(self, order: Order) -> None:
        """On rank 0, give the servers of this run an order; on other ranks do nothing."""
        here = self.joined.coordinates
        if here.rank == 0 and here.ranks_per_replica > 1:
            give(self._store, order)

    @property
    def _order_of_plan(self) -> tuple[int, ...]:
        """For each index in the mesh its global rank, by the user's plan; empty: no such order."""
        return self.config.plan.ranks if self.config.plan is not None else ()

    def _look_around(self, group: Group) -> Machine:
        """Survey the devices and links of all ranks, or return an earlier result (collective).

        Args:
            group: the group of all ranks, which call this together.
        """
        backend = backend_on(self.root_device, self._backend)
        return look_around(group, self.root_device, backend, self.config.capacity)

    def take_coordinates(self) -> None:
        """Join the mesh of replicas and stages, when sizes are known (collective over all ranks).

        This rank gets its coordinates. Environment variables and Lightning's cluster environment
        are set to the world of the replicas, and torch's default group to that of the drivers. If
        anything depends on the devices, they are surveyed.
        """
        world, (replicas, stages) = self.joined, self.shape
        if replicas > 1 and self._reseeds:  # drivers start with the same generators
            reset_seed()

        here = replace(self._coordinates_at(self.launched.rank), order=self._order_of_plan)

        def look(group: Group) -> Cluster:
            return cluster_of(group, self._look_around(group), here, self._drivers)

        joined = join(
            world.everyone,
            here,
            backend=self._backend,
            timeout=self._timeout,
            device=self.root_device,
            survey=look if self.config.needs_survey(replicas, stages) else None,
            capacity=self.config.capacity,
        )
        world.take_coordinates(joined)
        self.set_launched(self._environment)  # ranks may have got other coordinates
        self._show()
        world.mesh.init_default_group()


def refuse_other_numbers(
    environment: ClusterEnvironment, launched: LauncherRanks, hosts: int, per_host: int
) -> None:
    """Check that ``devices`` and ``num_nodes`` are the processes that the launcher has started.

    Lightning itself compares them for torchrun and SLURM alone.

    Args:
        environment: Lightning's cluster environment.
        launched: the launcher's numbers of this process.
        hosts: number of hosts, as the Trainer or Fabric was told.
        per_host: number of processes of each host, likewise.

    Raises:
        PlanError: they differ.
    """
    size = environment.world_size()
    local = launched.local_rank
    node = launched.node_rank
    if size != hosts * per_host or local >= per_host or node >= hosts:
        raise PlanError(
            f"devices={per_host} and num_nodes={hosts} are {hosts} x {per_host} processes, "
            f"and {type(environment).__name__} says that there are {size}, of which this one is "
            f"number {local} of host {node}. Give the processes of each host, as devices, and the "
            "hosts, as num_nodes, that were started."
        )


def given(value: T | None, name: str) -> T:
    """Return the value of a strategy's attribute that Lightning sets later; check that it is set.

    Args:
        value: the value; ``None``: it is not set.
        name: name of the attribute, for the error.

    Raises:
        HybridError: it is not set yet.
    """
    if value is None:
        raise HybridError(
            f"strategy.{name} is not set: a Trainer does so when it is made, or when its fit, "
            "validate, test or predict begins. Give the strategy to a Trainer first."
        )
    return value
