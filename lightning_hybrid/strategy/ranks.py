"""What Lightning asks a strategy about ranks: its world is that of the drivers, one per replica.

Sizes, ranks, barriers and broadcasts are here; what a run does is in
:mod:`lightning_hybrid.strategy.strategy`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from lightning_hybrid._lightning import (
    CHOSEN_MODULE,
    DDPStrategy,
    TorchElasticEnvironment,
    rank_zero_info,
    reset_seed,
)
from lightning_hybrid._lightning_private import (
    LOADING,
    ask_strategy_whether_distributed,
    set_rank_of_messages,
)
from lightning_hybrid.comm import Coordinates, Group, backend_on, choose_interface
from lightning_hybrid.config import Config
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Cluster, Machine
from lightning_hybrid.process import (
    Everyone,
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    Meeting,
    gather,
    join,
    look_around,
)
from lightning_hybrid.run import (
    Launched,
    NoWorld,
    Phase,
    ReplicaWorld,
    ShownRanks,
    World,
    asked_by_framework,
    hear_of_reads,
    refuse_other_shards,
)

NAMES = {
    "hybrid_gabra": "popen",
    "hybrid_gabra_spawn": "spawn",
    "hybrid_gabra_fork": "fork",
    "hybrid_gabra_notebook": "fork",
}
"""Registered names, and how each starts its processes."""

T = TypeVar("T")


class ReplicaStrategy(DDPStrategy):
    """To Lightning the world is that of DDP over the drivers.

    Args:
        config: what the user has asked for.
        lightning: arguments of ``DDPStrategy``.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # however it comes to be: made, copied, or unpickled in another process
        ask_strategy_whether_distributed(ReplicaStrategy)
        return super().__new__(cls)

    def __init__(self, config: Config, **lightning: Any) -> None:
        super().__init__(**lightning)
        self._config = config
        self._world: World | NoWorld = NoWorld()
        self._told_replicas: int | None = None
        """What the user's code has heard of the world's size before there were sizes."""
        self._asked_for = ""
        """How it has asked for it."""
        self._launched, self._shown = Launched(), ShownRanks()

    def __repr__(self) -> str:
        """With the package: a Trainer of the other one shows this when it is given the strategy."""
        return f"<{type(self).__name__} of {CHOSEN_MODULE}>"

    # ------------------------------------------------------------------ all processes

    @property
    def _per_host(self) -> int:
        """Number of processes of each host, one per device."""
        return len(self._parallel_devices or ())

    def _shape(self) -> tuple[int, int]:
        """Replicas and devices of each, for the devices that there are."""
        return self._config.shape(self._num_nodes, self._per_host)

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the mesh of replicas and stages."""
        if isinstance(self._world, World):  # ranks may have got others
            return self._world.coordinates
        return self._own_coordinates

    @property
    def _own_coordinates(self) -> Coordinates:
        """Those of this rank before a survey of the devices."""
        return self._coordinates_at(self._launched.rank)

    def coordinates_of(self, local_rank: int) -> Coordinates:
        """Those of a process of this host, before a survey of the devices."""
        return self._coordinates_at(self._launched.node_rank * self._per_host + local_rank)

    def _coordinates_at(self, rank: int) -> Coordinates:
        return Coordinates(rank, *self._shape(), free=self._config.several_stages_per_device)

    @property
    def root_device(self) -> torch.device:
        return given(self._parallel_devices, "parallel_devices")[self._launched.local_rank]

    # ------------------------------------------------------------------ replicas

    @property
    def _replica_world(self) -> ReplicaWorld:
        coordinates = self.coordinates
        if self._world.phase is Phase.CHOOSING:
            replicas = self._world.supposed_replicas
            stages = coordinates.replicas * coordinates.ranks_per_replica // replicas
            coordinates = Coordinates(coordinates.rank, replicas, stages)
        return ReplicaWorld.of(coordinates, self._launched, self._num_nodes, self._per_host)

    def _is_told(self, what: str) -> None:
        """The user's code is told a number of replicas, maybe before it is chosen."""
        world = self._world
        is_open = self._sizes_are_open and not world.has_coordinates
        if is_open and world.phase is not Phase.CHOOSING and not asked_by_framework():
            self._told_replicas, self._asked_for = self.num_replicas, what

    @property
    def num_replicas(self) -> int:
        """Over how many replicas the data is divided: what ``world_size`` is under DDP."""
        return self._shape()[0]

    @property
    def world_size(self) -> int:
        world = self._world
        if world.phase is Phase.ALONE:
            return 1  # Lightning's handler of SIGTERM would wait for the other drivers
        if world.phase is Phase.CHOOSING:
            return world.supposed_replicas
        self._is_told("trainer.world_size")
        return self.num_replicas

    @property
    def is_distributed(self) -> bool:
        """Whether the data is divided: with one replica it is not, whatever its stages."""
        return self.num_replicas > 1

    @property
    def global_rank(self) -> int:
        return self.coordinates.lightning_rank if self._parallel_devices else 0

    @property
    def local_rank(self) -> int:
        return self._replica_world.local_rank if self._parallel_devices else 0

    @property
    def node_rank(self) -> int:
        return self._replica_world.node_rank if self._parallel_devices else 0

    @property
    def num_processes(self) -> int:
        """Number of replicas whose drivers are on this host."""
        self._is_told("strategy.num_processes")
        return len(self._replica_world.drivers) if self._parallel_devices else 0

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of the drivers of this host."""
        devices = self._parallel_devices
        if not devices or self._launcher is None:  # the Trainer asks for what it was given
            return devices
        self._is_told("trainer.num_devices")
        return [devices[local_rank] for local_rank in self._replica_world.drivers]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    def num_nodes(self) -> int:
        """Number of hosts that have drivers."""
        if not self._parallel_devices or self._launcher is None:
            return self._num_nodes
        self._is_told("trainer.num_nodes")
        return self._replica_world.hosts

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.coordinates.dp_rank}

    def set_world_ranks(self) -> None:
        self._shown.restore()
        self._launched = Launched.by(self.cluster_environment, self._per_host)
        self._number(self._launched.rank, self._num_nodes * self._per_host)

    def _number(self, rank: int, size: int) -> None:
        """What the environment says where Lightning's object for it keeps the numbers itself."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(size)
        set_rank_of_messages(self.global_rank)

    def _show_ranks(self) -> None:
        """From now on the environment speaks of the replicas, until :meth:`hide_ranks`."""
        world = self._replica_world
        self._shown.show(world.variables)
        self._number(world.rank, world.size)

    def hide_ranks(self) -> None:
        """The run is over: the environment speaks of all processes again."""
        hear_of_reads(None)
        self._shown.restore()
        self._number(self._launched.rank, self._num_nodes * self._per_host)

    @contextmanager
    def _supposing(self, replicas: int) -> Iterator[None]:
        """Inside, where sizes are being chosen, the user's code finds so many replicas."""
        with self._joined.supposing(replicas):
            self._show_ranks()
            yield
        self._show_ranks()

    def process_dataloader(self, dataloader: object) -> object:
        processes = self._num_nodes * self._per_host
        refuse_other_shards(dataloader, self._launched.rank, processes, self._replica_world)
        return super().process_dataloader(dataloader)

    # ------------------------------------------------------------------ processes and groups

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``hybrid_gabra`` and its variants."""
        for name, start_method in NAMES.items():
            strategy_registry.register(
                name,
                cls,
                description=f"Stages placed by GABRA, in replicas (start method {start_method})",
                override=True,
                start_method=start_method,
            )

    def _configure_launcher(self) -> None:
        # complain now, before any process is started
        self._config.check_devices(self._num_nodes, self._per_host)
        if self._start_method == "popen":
            environment = given(self.cluster_environment, "cluster_environment")
            self._launcher = HybridSubprocessLauncher(environment, self._per_host, self._num_nodes)
        else:
            self._launcher = HybridMultiProcessingLauncher(
                self, self._start_method, self._per_host, coordinates_of=self.coordinates_of
            )

    def setup_distributed(self) -> None:
        if not self._sizes_are_open:
            self._start_alike()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self._world = World(self._gather())
        if self._sizes_are_open:
            self._show_ranks()  # of one chain; if that is asked for, it stays
            hear_of_reads(self._is_told)
        else:
            self._take_coordinates(self._world)

    @property
    def _sizes_are_open(self) -> bool:
        """Whether replicas and stages are to be chosen when the run is set up."""
        return self._config.leaves_sizes_open(self._num_nodes * self._per_host)

    def _start_alike(self) -> None:
        """Several drivers start with the same generators, as under DDP; one is like one device."""
        if self.num_replicas > 1:
            reset_seed()

    def _gather(self) -> Everyone:
        """Meet all other ranks, whatever the sizes."""
        environment = given(self.cluster_environment, "cluster_environment")
        coordinates = self._own_coordinates
        agent_serves = (
            isinstance(environment, TorchElasticEnvironment)
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        )
        address, port = environment.main_address, environment.main_port
        choose_interface(address, port, self._num_nodes)
        serve = coordinates.rank == 0 and not agent_serves
        return gather(coordinates, Meeting(address, port, self._num_nodes, serve))

    def _take_coordinates(self, world: World, machine: Machine | None = None) -> None:
        """Sizes are known: take coordinates in the mesh, with all other ranks.

        Args:
            world: all ranks.
            machine: what is known of their devices, if they have been looked at.
        """
        replicas, stages = self._shape()
        named = given(self._process_group_backend, "process_group_backend")
        backend = backend_on(self.root_device, named)

        def look(group: Group) -> Cluster:
            capacity = self._config.capacity
            seen = machine or look_around(group, self.root_device, backend, capacity)
            return seen.cluster(replicas, stages)

        joined = join(
            world.everyone,
            self._own_coordinates,
            backend=named,
            timeout=self._timeout or timedelta(minutes=30),
            device=self.root_device,
            survey=look if self._config.needs_survey(replicas, stages) else None,
            capacity=self._config.capacity,
        )
        world.take_coordinates(joined)
        hear_of_reads(None)
        self.set_world_ranks()  # ranks may have got other coordinates
        self._show_ranks()
        if not self._replica_world.even:
            rank_zero_info(
                f"The drivers of the {replicas} replicas are not spread evenly over the hosts, so "
                "trainer.num_devices * trainer.num_nodes is not their number: use "
                "trainer.world_size."
            )
        world.open()

    @property
    def _joined(self) -> World:
        if isinstance(self._world, World):
            return self._world
        raise HybridError(
            "This process has not met the other ranks yet; the strategy does so at the start of "
            "trainer.fit, validate, test or predict. Call this from a hook, or after a run."
        )

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if self._world.phase is Phase.RUNNING:
            super().barrier(name, *args, **kwargs)
        elif name != LOADING:  # between runs a rank may ask for a loader that others have
            self._world.barrier(name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._world.phase is Phase.RUNNING:
            return super().broadcast(obj, src)
        return self._world.broadcast(obj, src)

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        """Lightning cuts the mean of whole numbers, such as samples of batches, to a whole one.

        That is right where all replicas have as many.
        """
        if self._config.balance == "speed" and reduce_op in ("mean", "avg"):
            tensor = tensor if tensor.is_floating_point() else tensor.float()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """One replica is one device, whose tensors get no dimension of devices."""
        if self.num_replicas == 1:
            return tensor
        return super().all_gather(tensor, group, sync_grads)


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
