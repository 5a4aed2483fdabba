"""The ranks and sizes that Lightning and scripts are told: R replicas are counted, not processes.

A launcher numbers all processes. Scripts divide data and scale by ranks, which must give the same
as under DDP over R devices, and with one replica as on one device. So the world size is R, and
drivers have the ranks 0 .. R-1. Workers, which may run hooks before the set-up of a run, have ranks
from R on, so that code for one rank runs on one.

These are the numbers in properties of the strategy (:mod:`lightning_hybrid.strategy`) at any time,
and in environment variables during a run (:class:`ShownRanks`). Launchers, the store and the next
run need the numbers of all processes (:class:`LauncherRanks`).
"""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_hybrid._lightning import ClusterEnvironment, fabric, pytorch
from lightning_hybrid.comm import Coordinates
from lightning_hybrid.errors import PlanError


@dataclass(frozen=True)
class LauncherRanks:
    """The numbers that the launcher has given this process; all processes are counted.

    Attributes:
        rank: global rank of the process.
        local_rank: number of the process on its host.
        node_rank: number of the host.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0

    @classmethod
    def by(cls, environment: ClusterEnvironment | None, per_host: int) -> "LauncherRanks":
        """Read the numbers of this process from the launcher's environment.

        Also sets the global rank in Lightning's object where that keeps the number itself.

        Args:
            environment: Lightning's cluster environment; ``None``: all numbers are 0.
            per_host: number of processes of each host.
        """
        if environment is None:
            return cls()
        node, local = environment.node_rank(), environment.local_rank()
        environment.set_global_rank(node * per_host + local)  # no effect if the launcher has set it
        return cls(environment.global_rank(), local, node)

    def neighbours(self, hosts: int, per_host: int) -> list[int]:
        """Return the global ranks of all processes of this host, in the order of their local ranks.

        Args:
            hosts: number of hosts.
            per_host: number of processes of each host.
        """
        first = self.rank - self.local_rank
        if self.rank == self.node_rank * per_host + self.local_rank:
            return list(range(first, first + per_host))
        return list(range(self.node_rank, hosts * per_host, hosts))  # ranks go round the hosts


@dataclass(frozen=True)
class ReplicaWorld:
    """What Lightning and the user's script are told of ranks and hosts on one process.

    Replicas are counted, not processes.

    Attributes:
        rank: rank of this process: below ``size`` for drivers, from ``size`` on for workers.
        size: number of replicas, which is told as the world size.
        local_rank: number of this process on its host, where drivers are counted first.
        drivers: local ranks of this host's drivers, as the launcher counts them. If the host has no
            driver, that of its first worker.
        node_rank: number of this host: below ``hosts`` if it has drivers, else from ``hosts`` on.
        hosts: number of hosts that have drivers.
    """

    rank: int
    size: int
    local_rank: int
    drivers: tuple[int, ...]
    node_rank: int
    hosts: int

    @classmethod
    def of(
        cls, coordinates: Coordinates, launched: LauncherRanks, hosts: int, per_host: int
    ) -> "ReplicaWorld":
        """Compute what a process is told, from its place in the mesh and on its host.

        Args:
            coordinates: coordinates of the process.
            launched: the launcher's numbers of the process.
            hosts: number of hosts.
            per_host: number of processes of each host.
        """
        here = launched.neighbours(hosts, per_host)
        ranks = [replace(coordinates, rank=rank) for rank in range(hosts * per_host)]
        by_number = sorted(here, key=lambda rank: ranks[rank].lightning_rank)
        in_blocks = here[-1] - here[0] == per_host - 1
        host_of = [rank // per_host if in_blocks else rank % hosts for rank in range(len(ranks))]
        in_order = sorted(ranks, key=lambda each: each.lightning_rank)  # so drivers come first
        numbered = list(dict.fromkeys(host_of[each.rank] for each in in_order))
        # on a host without drivers the first worker stands for one
        drivers = [rank for rank in here if ranks[rank].is_driver] or by_number[:1]
        return cls(
            rank=coordinates.lightning_rank,
            size=coordinates.replicas,
            local_rank=by_number.index(launched.rank),
            drivers=tuple(here.index(rank) for rank in drivers),
            node_rank=numbered.index(host_of[coordinates.rank]),
            hosts=len({host_of[each.rank] for each in ranks if each.is_driver}),
        )

    @property
    def variables(self) -> dict[str, int]:
        """Values for the environment variables by which launchers tell ranks and sizes, by name."""
        numbers = (
            (self.rank, _RANK),
            (self.size, _SIZE),
            (self.local_rank, _LOCAL_RANK),
            (len(self.drivers), _LOCAL_SIZE),
            (self.node_rank, _NODE_RANK),
            (self.hosts, _HOSTS),
        )
        return {name: number for number, names in numbers for name in names}


_RANK = (
    "RANK",
    "ROLE_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "JSM_NAMESPACE_RANK",
)
_SIZE = (
    "WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JSM_NAMESPACE_SIZE",
)
_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
)
_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
_NODE_RANK = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
_HOSTS = ("GROUP_WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


@dataclass
class ShownRanks:
    """Sets the environment variables of ranks and sizes for a run, and puts them back after it.

    Only variables that the launcher has set are changed. Processes that are started meanwhile, such
    as those of loaders, inherit them.
    """

    _changed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def show(self, variables: Mapping[str, int]) -> None:
        """Set those of these environment variables that exist; :meth:`restore` puts them back.

        Args:
            variables: new values, by name.
        """
        self.restore()
        for name, value in variables.items():
            before = os.environ.get(name)
            if before is not None:
                self._changed[name] = before, str(value)
                os.environ[name] = str(value)

    def restore(self) -> None:
        """Put the launcher's values back, except in variables that other code has changed since."""
        while self._changed:
            name, (before, shown) = self._changed.popitem()
            if os.environ.get(name) == shown:
                os.environ[name] = before


_ASKED_THROUGH = {"world_size", "num_devices", "device_ids", "num_nodes"}
"""Properties of the Trainer that only pass on what its strategy says."""


def asked_by_framework() -> bool:
    """Whether the code that asks for a rank or size is a framework's, and not the user's.

    It looks at the call stack: the innermost caller outside of this package decides. Frameworks are
    Lightning, torch and this package; but Lightning's callbacks count as the user's code, since
    they keep the values that they read.
    """
    for name, function in _callers():
        if name.startswith("lightning_hybrid."):
            continue
        own, callbacks = (f"{pytorch.__name__}.{room}" for room in ("", "callbacks."))
        if name == f"{own}trainer.trainer" and function in _ASKED_THROUGH:
            continue
        if name.startswith(("torch.", "torchmetrics.", f"{fabric.__name__}.")):
            return True
        return name.startswith(own) and not name.startswith(callbacks)
    return True


def _callers() -> Iterator[tuple[str, str]]:
    """Yield names of module and function for each frame of the call stack, innermost first.

    It begins with the caller of the function that iterates over this.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        frame = frame.f_back


def refuse_other_shards(loader: Any, launched: int, all_ranks: int, world: ReplicaWorld) -> None:
    """Refuse a data loader that divides its samples over all processes, not over the replicas.

    The samples that it leaves to workers would be lost.

    Args:
        loader: a data loader on a driver.
        launched: the launcher's global rank of this process.
        all_ranks: number of all processes.
        world: what this process is told of ranks and sizes.

    Raises:
        PlanError: its sampler or data set was made for all processes, before the run.
    """
    batches = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "dataset", None), getattr(loader, "sampler", None), batches)
    for part in (*parts, getattr(batches, "sampler", None)):
        # the package `datasets` has them in an attribute `_distributed`
        for holder in (part, getattr(part, "_distributed", None)):
            for name in ("num_replicas", "world_size"):
                size = getattr(holder, name, None)
                if size != all_ranks or size == world.size or not isinstance(size, int):
                    continue
                if getattr(holder, "rank", launched) not in (launched, world.rank):
                    continue
                raise PlanError(
                    f"The {type(part).__name__} of a loader divides its samples by {name}="
                    f"{size}, the number of all processes; with {world.size} "
                    f"{'replicas' if world.size > 1 else 'replica'} the samples of the others "
                    "would be lost. Make it inside of the run (in train_dataloader), by "
                    "trainer.world_size and trainer.global_rank or by the environment there; or "
                    "leave it to Lightning, which adds a DistributedSampler by itself."
                )
