"""Where this process stands: among all that were launched, in the mesh, and among the replicas.

To Lightning and to scripts the world is that of DDP over the drivers, one per replica; what they
are told of it is :mod:`lightning_hybrid.run.replica_world`.
"""

import os
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from itertools import islice
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
    History,
    JoinOrder,
    Meeting,
    NoWorld,
    Order,
    Phase,
    Servers,
    World,
    cluster_of,
    give,
    has_met,
    history,
    join,
    known_machine,
    latest_order,
    look_around,
    orders,
    reach,
    store_of_all,
)
from lightning_hybrid.run import LauncherRanks, ReplicaWorld, ShownRanks, asked_by_framework
from lightning_hybrid.worker import Server, serve_here

T = TypeVar("T")


class StrategyRanks:
    """The ranks that a strategy speaks of, before, in and between its runs.

    Args:
        config: what the user has asked for.

    Attributes:
        config: the same, with sizes once they are chosen.
        devices: of all processes of this host, one each; ``None``: no Trainer has set them.
        hosts: number of hosts.
        world: all ranks, if this process has met them.
        launched: where the launcher has put this process.
        told_replicas: what the user's code has heard of the world's size before there were sizes.
        asked_for: how it has asked for it.
    """

    def __init__(self, config: Config, *, reseeds: bool = True) -> None:
        self.config = config
        self._reseeds = reseeds
        self.devices: list[torch.device] | None = None
        self.hosts = 1
        self.world: World | NoWorld = NoWorld()
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
        """Without groups: a Trainer can be pickled after a run, and spawned with."""
        return vars(self) | {"world": NoWorld()}

    # ------------------------------------------------------------------ all processes

    @property
    def per_host(self) -> int:
        """Number of processes of each host, one per device."""
        return len(self.devices or ())

    @property
    def shape(self) -> tuple[int, int]:
        """Replicas and devices of each, for the devices that there are."""
        return self.config.shape(self.hosts, self.per_host)

    @property
    def replicas(self) -> int:
        """Over how many replicas the data is divided."""
        return self.shape[0]

    @property
    def survivors(self) -> Survivors | None:
        """The replicas that go on if one is lost, in a run that does so."""
        world = self.world
        return world.mesh.survivors if isinstance(world, World) and world.has_coordinates else None

    @property
    def living(self) -> int:
        """Number of replicas, without lost ones."""
        return self.replicas if self.survivors is None else len(self.survivors.living)

    @property
    def global_rank(self) -> int:
        """The rank that Lightning is told: of drivers the number among those that are left."""
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
        """Where this rank stands in the mesh of replicas and stages."""
        if isinstance(self.world, World):  # ranks may have got others
            return self.world.coordinates
        return self._coordinates_at(self.launched.rank)

    def coordinates_of(self, local_rank: int) -> Coordinates:
        """Coordinates of a process of this host, before a survey of the devices."""
        return self._coordinates_at(self.launched.node_rank * self.per_host + local_rank)

    def _coordinates_at(self, rank: int) -> Coordinates:
        """Coordinates of a process before a survey of the devices."""
        return Coordinates(rank, *self.shape, free=self.config.several_stages_per_device)

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return given(self.devices, "parallel_devices")[self.launched.local_rank]

    # ------------------------------------------------------------------ replicas

    @property
    def replica_world(self) -> ReplicaWorld:
        """The world of the replicas, as this process is told it."""
        return ReplicaWorld.of(self.coordinates, self.launched, self.hosts, self.per_host)

    def is_told(self, what: str) -> None:
        """The user's code is told a number of replicas, maybe before it is chosen.

        Args:
            what: it has asked for.
        """
        is_open = self.sizes_are_open and not self.world.has_coordinates
        if is_open and self.world.phase is not Phase.CHOOSING and not asked_by_framework():
            self.told_replicas = self.replicas
            self.asked_for = what

    def set_launched(self, environment: ClusterEnvironment | None) -> None:
        """Take the numbers of the launcher.

        Args:
            environment: Lightning's, which has them.
        """
        self._environment = environment
        self._shown.restore()
        self.launched = LauncherRanks.by(environment, self.per_host)
        self._number(self.launched.rank, self.hosts * self.per_host)

    def _number(self, rank: int, size: int) -> None:
        """What the environment says where Lightning's object for it keeps the numbers itself."""
        if self._environment is not None:
            self._environment.set_global_rank(rank)
            self._environment.set_world_size(size)
        set_rank_of_messages(self.coordinates.lightning_rank if self.devices else 0)

    def _show(self) -> None:
        """Set the variables of ranks and sizes to those of the replicas, until :meth:`hide`."""
        world = self.replica_world
        self._shown.show(world.variables)
        self._number(world.rank, world.size)

    def hide(self) -> None:
        """Set the variables of ranks and sizes to the launcher's again, after a run."""
        self._shown.restore()
        self._number(self.launched.rank, self.hosts * self.per_host)

    # ------------------------------------------------------------------ groups

    @property
    def sizes_are_open(self) -> bool:
        """Whether replicas and stages are to be chosen when the run is set up."""
        return self.config.leaves_sizes_open(self.hosts * self.per_host)

    @property
    def joined(self) -> World:
        """All ranks.

        Raises:
            HybridError: this process has not met them.
        """
        if isinstance(self.world, World):
            return self.world
        raise HybridError(
            "This process has not met the other ranks yet; the strategy does so at the start of "
            "trainer.fit, validate, test, predict or fabric.launch. Call this from a hook, in the "
            "function that is launched, or after a run."
        )

    def meet(self, backend: str, timeout: timedelta) -> None:
        """Meet all other ranks; where sizes are given, this rank gets its coordinates.

        Args:
            backend: of the process groups.
            timeout: of tensors between ranks.
        """
        self._backend = backend
        self._timeout = timeout
        environment = given(self._environment, "cluster_environment")
        refuse_other_numbers(environment, self.launched, self.hosts, self.per_host)
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
        before = history()
        store = self._store
        if coordinates.rank == 0 and Servers.ranks:
            give(store, self._join_order(before, coordinates))
        self.world = World(reach(coordinates, meeting), timeout)
        self.world.begin()
        # (rank 0 gives the next order when all have joined the mesh)
        self._latest_order = latest_order(store)
        if self.sizes_are_open:
            self._show()  # of one chain, so that nobody divides data by all processes
        else:
            self.take_coordinates()

    def ranks_to_serve(self, *, scripted: bool) -> Collection[int]:
        """The ranks that get servers, where this process starts the others: all workers.

        Where sizes are left open, ranks run the script up to the choice of sizes. Where it cannot
        be started again, sizes that are open become one chain.

        Args:
            scripted: whether other processes could run the script.
        """
        if self.hosts > 1:
            return ()
        if self.sizes_are_open and (Servers.ranks or not scripted):
            self.config = replace(self.config, data_parallel_size=1)
        if self.sizes_are_open:
            return ()
        here = replace(self._coordinates_at(0), order=self._order_of_plan)
        return [r for r in range(self.per_host) if not replace(here, rank=r).is_driver]

    def _keep_drivers(self) -> None:
        """Where other ranks are servers since an earlier run: leave the drivers as they are.

        Raises:
            PlanError: more drivers are asked for, or others.
        """
        scripts = [rank for rank in range(self.hosts * self.per_host) if rank not in Servers.ranks]
        if Servers.ranks and self.sizes_are_open:
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
        """The ranks that must be drivers, since others serve; empty: any may be."""
        size, (replicas, stages) = self.hosts * self.per_host, self.shape
        usual = range(0, size, stages)
        if not Servers.ranks:
            return ()
        if Servers.ranks.isdisjoint(usual):
            return tuple(usual)
        return tuple(rank for rank in range(size) if rank not in Servers.ranks)[:replicas]

    def _join_order(self, before: History, here: Coordinates) -> JoinOrder:
        """The order for servers to join the run that this process, rank 0, begins.

        Args:
            before: the groups that this process had before.
            here: its coordinates.
        """
        devices = given(self.devices, "parallel_devices")
        capacity, device = self.config.capacity, self.root_device
        backend, size = backend_on(device, self._backend), self.hosts * self.per_host
        return JoinOrder(
            history=before,
            coordinates=replace(here, order=self._order_of_plan),
            backend=self._backend,
            timeout=self._timeout,
            devices=tuple(devices),
            surveys=self.config.needs_survey(*self.shape),
            machine=known_machine(size, device, backend, capacity),
            capacity=capacity,
        )

    @property
    def _store(self) -> dist.Store:
        """The store of all runs of this process."""
        meeting = given(self._meeting, "meeting")
        return store_of_all(meeting, self.launched.rank, self.hosts * self.per_host)

    def serve_if_worker(self, module: nn.Module | None = None, *, for_good: bool) -> None:
        """Sizes are known: on a worker, serve from here on. All ranks call this together.

        Args:
            module: of this rank, if it has one yet.
            for_good: whether workers serve in later runs too. Else this process was started for
                this run alone, and ends with it.
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
        """On rank 0: give the servers of this run an order; elsewhere do nothing."""
        here = self.joined.coordinates
        if here.rank == 0 and here.ranks_per_replica > 1:
            give(self._store, order)

    @property
    def _order_of_plan(self) -> tuple[int, ...]:
        """For each index in the mesh the rank, by the user's plan; empty: there is none."""
        return self.config.plan.ranks if self.config.plan is not None else ()

    def look_around(self, group: Group) -> Machine:
        """Look at the devices of all ranks of a group, which call this together."""
        backend = backend_on(self.root_device, self._backend)
        return look_around(group, self.root_device, backend, self.config.capacity)

    def take_coordinates(self, machine: Machine | None = None) -> None:
        """Sizes are known: take coordinates in the mesh, with all other ranks.

        Args:
            machine: what is known of their devices, if they have been looked at.
        """
        world, (replicas, stages) = self.joined, self.shape
        if replicas > 1 and self._reseeds:  # drivers start with the same generators
            reset_seed()

        here = replace(self._coordinates_at(self.launched.rank), order=self._order_of_plan)

        def look(group: Group) -> Cluster:
            return cluster_of(group, machine or self.look_around(group), here, self._drivers)

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
    """A Trainer or Fabric that has been told of other processes than were started.

    Lightning compares them for torchrun and SLURM alone.

    Raises:
        PlanError: it has.
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
    """An attribute that Lightning declares as optional, and sets before it calls a strategy.

    Raises:
        HybridError: it is not set yet.
    """
    if value is None:
        raise HybridError(
            f"strategy.{name} is not set: a Trainer does so when it is made, or when its fit, "
            "validate, test or predict begins. Give the strategy to a Trainer first."
        )
    return value
