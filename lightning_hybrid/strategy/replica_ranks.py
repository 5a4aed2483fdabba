"""What strategies say of ranks, to Lightning's Trainer and Fabric alike: the world of the replicas.

With R replicas there are R ranks, as under DDP over R devices, whatever their stages.
"""

from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_hybrid._lightning import ClusterEnvironment
from lightning_hybrid._lightning_private import LOADING
from lightning_hybrid.comm import Coordinates, Failure
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Plan
from lightning_hybrid.process import Phase
from lightning_hybrid.run import BetweenRuns, DriverSession, refuse_other_shards
from lightning_hybrid.strategy.launcher import (
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    has_script,
)
from lightning_hybrid.strategy.ranks import StrategyRanks, given
from lightning_hybrid.strategy.refusals import say_what_is_off

T = TypeVar("T")


class ReplicaRanks:
    """Where a process stands, as a strategy tells it, and what it says to the others.

    A base of strategies, in front of Lightning's.
    """

    _ranks: StrategyRanks
    _plans: dict[str, Plan]
    _launcher: Any
    _session: BetweenRuns | DriverSession
    _no_run: str
    """What a process is told that asks for a run where there is none, behind its name."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force; of the first network, if there are several. ``None`` before it."""
        return next(iter(self._plans.values()), self._ranks.config.plan)

    @property
    def _driving(self) -> DriverSession:
        """The run of this driver.

        Raises:
            HybridError: there is none.
        """
        if isinstance(self._session, DriverSession):
            return self._session
        raise HybridError(f"{self.coordinates} {self._no_run}")

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands in the mesh of replicas and stages."""
        return self._ranks.coordinates

    @property
    def root_device(self) -> torch.device:
        return self._ranks.root_device

    @property
    def num_replicas(self) -> int:
        """Over how many replicas the data is divided: what ``world_size`` is under DDP."""
        return self._ranks.living

    @property
    def world_size(self) -> int:
        world = self._ranks.world
        if world.phase is Phase.ALONE:
            return 1  # Lightning's handler of SIGTERM would wait for the other drivers
        self._ranks.is_told("trainer.world_size")
        return self.num_replicas

    @property
    def is_distributed(self) -> bool:
        """Whether the data is divided: with one replica it is not, whatever its stages."""
        return self._ranks.replicas > 1

    @property
    def global_rank(self) -> int:
        return self._ranks.global_rank if self._ranks.devices else 0

    @property
    def local_rank(self) -> int:
        return self._ranks.replica_world.local_rank if self._ranks.devices else 0

    @property
    def node_rank(self) -> int:
        return self._ranks.replica_world.node_rank if self._ranks.devices else 0

    @property
    def num_processes(self) -> int:
        """Number of replicas whose drivers are on this host."""
        self._ranks.is_told("strategy.num_processes")
        return len(self._ranks.replica_world.drivers) if self._ranks.devices else 0

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of the drivers of this host."""
        devices = self._ranks.devices
        if not devices or self._launcher is None:  # the Trainer asks for what it was given
            return devices
        self._ranks.is_told("trainer.num_devices")
        return [devices[local_rank] for local_rank in self._ranks.replica_world.drivers]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._ranks.devices = devices

    @property
    def num_nodes(self) -> int:
        """Number of hosts that have drivers."""
        if not self._ranks.devices or self._launcher is None:
            return self._ranks.hosts
        self._ranks.is_told("trainer.num_nodes")
        return self._ranks.replica_world.hosts

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._ranks.hosts = num_nodes

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Of all that run the script, which in a run are the drivers."""
        if self._ranks.world.phase is Phase.RUNNING:
            self._session.fence()
            super().barrier(name, *args, **kwargs)  # type: ignore[misc]
        elif name != LOADING:  # between runs a rank may ask for a loader that others have
            self._ranks.world.barrier(name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """To all that run the script, which in a run are the drivers."""
        if self._ranks.world.phase is Phase.RUNNING:
            self._session.fence()
            sent: T = super().broadcast(obj, src)  # type: ignore[misc]
            return sent
        return self._ranks.world.broadcast(obj, src)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """One replica is one device, whose tensors get no dimension of devices."""
        if not self.is_distributed:
            return tensor
        self._session.fence()
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    def process_dataloader(self, dataloader: Any) -> Any:
        """One that leaves samples to other processes than the drivers is refused."""
        ranks = self._ranks
        processes = ranks.hosts * ranks.per_host
        refuse_other_shards(dataloader, ranks.launched.rank, processes, ranks.replica_world)
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def _tell(self, error: BaseException, code: str, by: str, later: str) -> Failure | None:
        """Tell the other ranks of an error of this one.

        Args:
            error: gets a note if this is a worker that runs the user's code.
            code: that workers run, too.
            by: the object by which the user's code knows ranks.
            later: the place of code that drivers alone run.

        Returns:
            The failure that came first, on another rank; ``None``: it is this one.
        """
        rank, world = str(self.coordinates), self._ranks.world
        begun = self._ranks.sizes_are_open or world.has_coordinates
        ours = begun and world.phase is Phase.TOGETHER and isinstance(error, Exception)
        if ours and self.global_rank >= self.num_replicas:
            error.add_note(
                f"({code} runs on workers too. To them {by}.global_rank, here {self.global_rank}, "
                f"is not below {by}.world_size, {self.num_replicas}: shard data by these {later}, "
                "which drivers alone run.)"
            )
        first = world.fail(error, rank)
        self._session.fail(first or Failure.of(error, rank), error)
        return first

    def hide_ranks(self) -> None:
        """Set the variables of ranks and sizes to the launcher's again, after a run."""
        self._ranks.hide()

    def _launcher_of_processes(
        self,
        environment: ClusterEnvironment | None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"],
    ) -> HybridSubprocessLauncher | HybridMultiProcessingLauncher:
        """What starts the other processes of this host.

        Args:
            environment: Lightning's.
            start_method: how.

        Raises:
            PlanError: the devices do not suit what was asked for.
        """
        say_what_is_off()
        ranks = self._ranks
        # complain now, before any process is started
        ranks.config.check_devices(ranks.hosts, ranks.per_host)
        if start_method == "popen":
            environment = given(environment, "cluster_environment")
            launcher = HybridSubprocessLauncher(environment, ranks.per_host, ranks.hosts)
            launcher.servers = partial(ranks.ranks_to_serve, scripted=has_script())
            return launcher
        return HybridMultiProcessingLauncher(
            self,  # type: ignore[arg-type]  # a strategy beside this base
            start_method,
            ranks.per_host,
            coordinates_of=ranks.coordinates_of,
        )
