"""What both strategies, for the Trainer and for Fabric, tell Lightning of ranks and devices.

With R replicas Lightning is told of R ranks, as under DDP over R devices, however many stages a
replica has.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lightning_hybrid._lightning import ClusterEnvironment, Trainer
from lightning_hybrid._lightning_private import LOADING
from lightning_hybrid.comm import Coordinates, Failure
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Plan
from lightning_hybrid.process import Phase, has_met
from lightning_hybrid.run import BetweenRuns, DriverSession, refuse_other_shards, say_chain
from lightning_hybrid.strategy.launcher import (
    HybridMultiProcessingLauncher,
    HybridSubprocessLauncher,
    has_script,
)
from lightning_hybrid.strategy.ranks import StrategyRanks, given
from lightning_hybrid.strategy.refusals import say_what_is_off

T = TypeVar("T")


class ReplicaRanks:
    """Base class of both strategies: ranks, sizes and devices as Lightning is told, and barriers.

    It stands before Lightning's own strategy among the bases.
    """

    _ranks: StrategyRanks
    _plans: dict[str, Plan]
    _launcher: Any
    _session: BetweenRuns | DriverSession
    _no_run: str
    """Error text, to follow the rank's name, for code that needs a run where there is none."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force, of the first network if there are several; ``None``: no plan yet."""
        return next(iter(self._plans.values()), self._ranks.config.plan)

    @property
    def _driving(self) -> DriverSession:
        """The session of the run that this driver is in.

        Raises:
            HybridError: this rank is in no run, or is no driver.
        """
        if isinstance(self._session, DriverSession):
            return self._session
        raise HybridError(f"{self.coordinates} {self._no_run}")

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank in the mesh of replicas and stages."""
        return self._ranks.coordinates

    @property
    def root_device(self) -> torch.device:
        return self._ranks.root_device

    @property
    def num_replicas(self) -> int:
        """Number of replicas over which the data is divided, lost ones left out."""
        return self._ranks.living

    @property
    def world_size(self) -> int:
        world = self._ranks.world
        if world.phase is Phase.ALONE:
            return 1  # Lightning's handler of SIGTERM would wait for the other drivers
        self._ranks.note_asked("trainer.world_size")
        return self.num_replicas

    @property
    def is_distributed(self) -> bool:
        """Whether there are several replicas, over which the data is divided."""
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
        """Number of processes on this host as Lightning is told: its drivers; 0: not known yet."""
        self._ranks.note_asked("strategy.num_processes")
        return len(self._ranks.replica_world.drivers) if self._ranks.devices else 0

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """What Lightning and scripts are told: the devices of this host's drivers, not of workers.

        Before the launcher is made, all devices as the Trainer was given them; ``None``: not given
        yet.
        """
        devices = self._ranks.devices
        if not devices or self._launcher is None:  # the Trainer asks for what it was given
            return devices
        self._ranks.note_asked("trainer.num_devices")
        return [devices[local_rank] for local_rank in self._ranks.replica_world.drivers]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._ranks.devices = devices

    @property
    def num_nodes(self) -> int:
        """Number of hosts that have drivers; before the launcher is made, of all hosts."""
        if not self._ranks.devices or self._launcher is None:
            return self._ranks.hosts
        self._ranks.note_asked("trainer.num_nodes")
        return self._ranks.replica_world.hosts

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._ranks.hosts = num_nodes

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks that run the script; during a run these are the drivers.

        Args:
            name: name of the barrier.
            args: passed on to Lightning's own barrier.
            kwargs: likewise.
        """
        if self._ranks.world.phase is Phase.RUNNING:
            self._session.fence()
            super().barrier(name, *args, **kwargs)  # type: ignore[misc]
        elif name != LOADING:  # between runs a rank may ask for a loader that others have
            self._ranks.world.barrier(name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return an object of one rank on all ranks that run the script; in a run, on the drivers.

        Args:
            obj: the object of this rank.
            src: rank whose object all get, as Lightning counts ranks (``trainer.global_rank``).
        """
        if self._ranks.world.phase is Phase.RUNNING:
            self._session.fence()
            sent: T = super().broadcast(obj, src)  # type: ignore[misc]
            return sent
        return self._ranks.world.broadcast(obj, src)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather a tensor from all drivers, in the order of the replicas (collective over them).

        Returns:
            The tensors, stacked in a new first dimension. With one replica the tensor as it is, as
            on one device.
        """
        if not self.is_distributed:
            return tensor
        self._session.fence()
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    def process_dataloader(self, dataloader: Any) -> Any:
        """Check a data loader, and return what Lightning's own strategy makes of it.

        Raises:
            PlanError: it divides its samples over all processes; those of workers would be lost.
        """
        ranks = self._ranks
        processes = ranks.hosts * ranks.per_host
        refuse_other_shards(dataloader, ranks.launched.rank, processes, ranks.replica_world)
        return super().process_dataloader(dataloader)  # type: ignore[misc]

    def _tell(self, error: BaseException, code: str, by: str, later: str) -> Failure | None:
        """Tell the other ranks that this one has failed.

        The error gets a note if this rank, which runs the user's code now, is or may become a
        worker: code that divides data by ranks fails on such.

        Args:
            error: what this rank has raised.
            code: for the note: the code that workers run too.
            by: for the note: name of the object that the user's code asks for ranks.
            later: for the note: where to put code that drivers alone are to run.

        Returns:
            The failure of another rank that came first; ``None``: this rank is the first to fail.
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
        """Set the environment variables of ranks and sizes back to the launcher's numbers."""
        self._ranks.hide()

    def _ranks_to_serve(self, trainer: Trainer | None) -> Collection[int]:
        """Return the local ranks whose processes are to be servers.

        Args:
            trainer: the Trainer; ``None`` under Fabric.
        """
        self._take_known_chain(trainer)
        return self._ranks.ranks_to_serve(scripted=has_script())

    def _take_known_chain(self, trainer: Trainer | None) -> None:
        """Let all devices form one chain if sizes are open, and the kind of the run decides that.

        All ranks that run the script call this before they meet. It is for the first run: later
        ones keep the drivers.

        Args:
            trainer: the Trainer, which begins a run; ``None`` under Fabric.
        """
        ranks = self._ranks
        known = ranks.sizes_are_open and not has_met()
        if known and (reason := self._why_chain(trainer)) is not None:
            say_chain(ranks.hosts * ranks.per_host, reason)
            ranks.config = replace(ranks.config, data_parallel_size=1)

    def _why_chain(self, trainer: Trainer | None) -> str | None:
        """Say why all devices form one chain if sizes are open; ``None``: sizes are to be chosen.

        Args:
            trainer: the Trainer, which begins a run; ``None`` under Fabric.
        """
        raise NotImplementedError

    def _launcher_of_processes(
        self,
        environment: ClusterEnvironment | None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"],
    ) -> HybridSubprocessLauncher | HybridMultiProcessingLauncher:
        """Make the launcher that starts the other processes of this host.

        Args:
            environment: Lightning's cluster environment.
            start_method: ``"popen"`` starts servers, and the script for other drivers; the others
                start a process per device by Python's `multiprocessing`.

        Raises:
            PlanError: the devices do not suit the sizes or capacities that the user has given.
        """
        say_what_is_off()
        ranks = self._ranks
        # complain now, before any process is started
        ranks.config.check_devices(ranks.hosts, ranks.per_host)
        if start_method == "popen":
            environment = given(environment, "cluster_environment")
            launcher = HybridSubprocessLauncher(environment, ranks.per_host, ranks.hosts)
            launcher.servers = self._ranks_to_serve
            return launcher
        return HybridMultiProcessingLauncher(
            self,  # type: ignore[arg-type]  # a strategy beside this base
            start_method,
            ranks.per_host,
            coordinates_of=ranks.coordinates_of,
        )
