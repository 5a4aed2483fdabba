"""What Lightning asks a strategy about ranks: its world is that of the drivers, one per replica.

Sizes, ranks, barriers and broadcasts are here; what a run does is in
:mod:`lightning_hybrid.strategy`.
"""

import os
import sys
from datetime import timedelta
from typing import Any, Self, TypeVar

from torch import Tensor

from lightning_hybrid._lightning import (
    CHOSEN_MODULE,
    DDPStrategy,
    TorchElasticEnvironment,
    fabric,
    pytorch,
    reset_seed,
)
from lightning_hybrid._lightning_private import ask_strategy_whether_distributed
from lightning_hybrid.comm import Coordinates, Group, choose_interface
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
    survey,
)
from lightning_hybrid.world import NoWorld, Phase, World

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

    def __repr__(self) -> str:
        """With the package: a Trainer of the other one shows this when it is given the strategy."""
        return f"<{type(self).__name__} of {CHOSEN_MODULE}>"

    # ------------------------------------------------------------------ sizes, ranks

    def _shape(self) -> tuple[int, int]:
        """Replicas and devices of each, for the devices that there are."""
        return self._config.shape(self.num_nodes, self.num_processes)

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the mesh of replicas and stages."""
        if isinstance(self._world, World):  # ranks may have got others
            return self._world.coordinates
        return self._own_coordinates

    @property
    def _own_coordinates(self) -> Coordinates:
        """Those of this rank before a survey of the devices."""
        environment = self.cluster_environment
        return self._coordinates_at(environment.global_rank() if environment else 0)

    def coordinates_of(self, local_rank: int) -> Coordinates:
        """Those of a process of this host, before a survey of the devices."""
        return self._coordinates_at(self.node_rank * self.num_processes + local_rank)

    def _coordinates_at(self, rank: int) -> Coordinates:
        return Coordinates(rank, *self._shape(), free=self._config.several_stages_per_device)

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
        if self._sizes_are_open and not world.has_coordinates and not _asked_by_lightning():
            self._told_replicas = self.num_replicas
        return self.num_replicas

    @property
    def is_distributed(self) -> bool:
        """Whether the data is divided: with one replica it is not, whatever its stages."""
        return self.num_replicas > 1

    @property
    def global_rank(self) -> int:
        return self.coordinates.lightning_rank if self.parallel_devices else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_replicas, "rank": self.coordinates.dp_rank}

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
        self._config.check_devices(self.num_nodes, self.num_processes)
        if self._start_method == "popen":
            environment = given(self.cluster_environment, "cluster_environment")
            self._launcher = HybridSubprocessLauncher(
                environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = HybridMultiProcessingLauncher(
                self, self._start_method, coordinates_of=self.coordinates_of
            )

    def setup_distributed(self) -> None:
        if not self._sizes_are_open:
            self._start_alike()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self._world = World(self._gather())
        if not self._sizes_are_open:
            self._take_coordinates(self._world)

    @property
    def _sizes_are_open(self) -> bool:
        """Whether replicas and stages are to be chosen when the run is set up."""
        return self._config.leaves_sizes_open(self.num_nodes * self.num_processes)

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
        choose_interface(address, port, self.num_nodes)
        serve = coordinates.rank == 0 and not agent_serves
        return gather(coordinates, Meeting(address, port, self.num_nodes, serve))

    def _take_coordinates(self, world: World, machine: Machine | None = None) -> None:
        """Sizes are known: take coordinates in the mesh, with all other ranks.

        Args:
            world: all ranks.
            machine: what is known of their devices, if they have been looked at.
        """
        replicas, stages = self._shape()

        def look(group: Group) -> Cluster:
            if machine is not None:
                return machine.cluster(replicas, stages)
            return survey(group, self.root_device, replicas, stages, self._config.capacity)

        joined = join(
            world.everyone,
            self._own_coordinates,
            backend=given(self._process_group_backend, "process_group_backend"),
            timeout=self._timeout or timedelta(minutes=30),
            device=self.root_device,
            survey=look if self._config.needs_survey(stages) else None,
            capacity=self._config.capacity,
        )
        world.take_coordinates(joined)
        self.set_world_ranks()  # ranks may have got other coordinates
        world.open()

    @property
    def _joined(self) -> World:
        if isinstance(self._world, World):
            return self._world
        raise HybridError(
            "This process has not met the other ranks yet; the strategy does so at the start of "
            "trainer.fit, validate, test or predict. Call this from a hook, or after a run."
        )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._world.phase is Phase.RUNNING:
            super().barrier(*args, **kwargs)
        else:
            self._world.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._world.phase is Phase.RUNNING:
            return super().broadcast(obj, src)
        return self._world.broadcast(obj, src)

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


def _asked_by_lightning() -> bool:
    """Whether the world's size is asked for by the Trainer, which names files by it.

    Callbacks of Lightning's keep what they are told, as those of users do.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name == "world_size" and frame.f_back is not None:  # the Trainer's property
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__", ""))
    own, callbacks = (f"{pytorch.__name__}.{room}" for room in ("", "callbacks."))
    return name.startswith((own, f"{fabric.__name__}.")) and not name.startswith(callbacks)
