"""Where this process stands: among all that were launched, in the mesh, and among the replicas.

To Lightning and to scripts the world is that of DDP over the drivers, one per replica; what they
are told of it is :mod:`lightning_hybrid.run.replica_world`.
"""

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_hybrid._lightning import (
    ClusterEnvironment,
    TorchElasticEnvironment,
    rank_zero_info,
    reset_seed,
)
from lightning_hybrid._lightning_private import set_rank_of_messages
from lightning_hybrid.comm import Coordinates, Group, Survivors, backend_on, choose_interface
from lightning_hybrid.config import Config
from lightning_hybrid.errors import HybridError, PlanError
from lightning_hybrid.planning import Cluster, Machine
from lightning_hybrid.process import (
    Everyone,
    History,
    JoinOrder,
    Meeting,
    NoWorld,
    Phase,
    Servers,
    World,
    give,
    has_met,
    history,
    join,
    known_machine,
    look_around,
    meeting_at,
    reach,
)
from lightning_hybrid.run import LauncherRanks, ReplicaWorld, ShownRanks, asked_by_framework

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
        served: whether the other devices have servers, so that this process alone runs the script.
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
        self.served = False
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
        before = history()
        everyone = reach(coordinates, meeting)
        self.world = World(everyone, timeout, served=self.served)
        if self.served:
            self._call_servers(before, everyone)
        self.world.begin()
        if self.sizes_are_open:
            self._show()  # of one chain, so that nobody divides data by all processes
        else:
            self.take_coordinates()

    def take_servers(self, *, scripted: bool) -> bool:
        """Whether the other devices get servers, so that this process alone runs the script.

        So far that is so for one replica on one host. Where no script can be started again,
        servers are the only way: sizes that are open become one chain.

        Args:
            scripted: whether other processes could run the script.

        Raises:
            PlanError: several replicas are asked for, and other devices have servers already.
        """
        begun = bool(Servers.processes)
        alone = begun or not scripted
        if self.hosts > 1 or (self.sizes_are_open and not alone):
            return False
        if self.sizes_are_open:
            self.config = replace(self.config, data_parallel_size=1)
        if begun and self.replicas > 1:
            raise PlanError(
                f"data_parallel_size({self.replicas}): an earlier run of this script has one "
                "replica, so the script runs once, and its later runs have one replica too. Train "
                "with several replicas in a script of its own."
            )
        self.served = self.replicas == 1
        return self.served

    def _call_servers(self, before: History, everyone: Everyone) -> None:
        """Have the servers join the run that this process begins.

        Args:
            before: the groups that this process had before it has reached the store.
            everyone: what it has since then.
        """
        capacity, device = self.config.capacity, self.root_device
        devices = given(self.devices, "parallel_devices")
        backend = backend_on(device, self._backend)
        here = everyone.coordinates
        give(
            [
                JoinOrder(
                    history=before,
                    coordinates=replace(here, rank=rank, order=self._order_of_plan),
                    meeting=meeting_at(everyone.store),
                    backend=self._backend,
                    timeout=self._timeout,
                    device=devices[rank],
                    surveys=self.config.needs_survey(*self.shape),
                    machine=known_machine(len(devices), device, backend, capacity),
                    capacity=capacity,
                )
                for rank in range(1, len(devices))
            ]
        )

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

        order = self._order_of_plan

        def look(group: Group) -> Cluster:
            cluster = (machine or self.look_around(group)).cluster(replicas, stages)
            return replace(cluster, order=order or cluster.order)

        joined = join(
            world.everyone,
            replace(self._coordinates_at(self.launched.rank), order=order),
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
