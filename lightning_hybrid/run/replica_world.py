"""What scripts are told of ranks: the world of the replicas, whatever the launcher has started.

A launcher numbers all processes. To a script with R replicas there are R: what it divides, shards
or scales by ranks must come out as under DDP over R devices, and with one replica as on one device.
So the drivers are numbered 0 .. R-1; workers, who run the hooks before the set-up of a run, have
numbers above these, so that what is to happen on one rank happens on one.

The properties of the strategy say so at any time (:mod:`lightning_hybrid.strategy`), and the
environment inside of a run: :class:`ShownRanks`. The launchers, the store and the next run need the
numbers of all processes: :class:`Launched` keeps them.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_hybrid._lightning import ClusterEnvironment, fabric, pytorch
from lightning_hybrid.comm import Coordinates
from lightning_hybrid.errors import PlanError


@dataclass(frozen=True)
class Launched:
    """Where the launcher has put this process, among all processes.

    Attributes:
        rank: number of the process.
        local_rank: its number on its host.
        node_rank: number of the host.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0

    @classmethod
    def by(cls, environment: ClusterEnvironment | None, per_host: int) -> "Launched":
        """The place of this process, from the environment that the launcher has set.

        Args:
            environment: Lightning's.
            per_host: number of processes of each host.
        """
        if environment is None:
            return cls()
        node, local = environment.node_rank(), environment.local_rank()
        environment.set_global_rank(node * per_host + local)  # where nobody else has numbered them
        return cls(environment.global_rank(), local, node)

    def neighbours(self, hosts: int, per_host: int) -> list[int]:
        """All ranks of this host, by their local ranks."""
        first = self.rank - self.local_rank
        if self.rank == self.node_rank * per_host + self.local_rank:
            return list(range(first, first + per_host))
        return list(range(self.node_rank, hosts * per_host, hosts))  # dealt out in turns


@dataclass(frozen=True)
class ReplicaWorld:
    """The world of the replicas, as one process sees it.

    Attributes:
        rank: of this process; those of drivers are below ``size``, those of workers are not.
        size: number of replicas.
        local_rank: as ``rank``, among the processes of this host.
        drivers: local ranks, as launched, of the drivers of this host; without any, the first.
        node_rank: number of this host; those with drivers are below ``hosts``, others are not.
        hosts: number of hosts that have drivers.
        even: whether each of these has as many.
    """

    rank: int
    size: int
    local_rank: int
    drivers: tuple[int, ...]
    node_rank: int
    hosts: int
    even: bool

    @classmethod
    def of(
        cls, coordinates: Coordinates, launched: Launched, hosts: int, per_host: int
    ) -> "ReplicaWorld":
        """The world of the replicas, as one process of the launcher sees it.

        Args:
            coordinates: where it stands.
            launched: where the launcher has put it.
            hosts: number of hosts.
            per_host: number of processes of each.
        """
        here = launched.neighbours(hosts, per_host)
        ranks = [replace(coordinates, rank=rank) for rank in range(hosts * per_host)]
        by_number = sorted(here, key=lambda rank: ranks[rank].lightning_rank)
        in_blocks = here[-1] - here[0] == per_host - 1
        host_of = [rank // per_host if in_blocks else rank % hosts for rank in range(len(ranks))]
        on_hosts = Counter(host_of[each.rank] for each in ranks if each.is_driver)
        in_order = sorted(ranks, key=lambda each: each.lightning_rank)  # drivers first
        numbered = list(dict.fromkeys(host_of[each.rank] for each in in_order))
        # a host of workers alone has local ranks too, and must have a first one
        drivers = [rank for rank in here if ranks[rank].is_driver] or by_number[:1]
        return cls(
            rank=coordinates.lightning_rank,
            size=coordinates.replicas,
            local_rank=by_number.index(launched.rank),
            drivers=tuple(here.index(rank) for rank in drivers),
            node_rank=numbered.index(host_of[coordinates.rank]),
            hosts=len(on_hosts),
            even=len({*on_hosts.values()}) == 1,
        )

    @property
    def variables(self) -> dict[str, int]:
        """What launchers and schedulers call these numbers in the environment."""
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
    *("RANK", "ROLE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "JSM_NAMESPACE_RANK",
)
_SIZE = (
    *("WORLD_SIZE", "ROLE_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JSM_NAMESPACE_SIZE"),
)
_LOCAL_RANK = (
    *("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "JSM_NAMESPACE_LOCAL_RANK",
)
_LOCAL_SIZE = (
    *("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "JSM_NAMESPACE_LOCAL_SIZE",
)
_NODE_RANK = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
_HOSTS = ("GROUP_WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SIZES = frozenset((*_SIZE, *_LOCAL_SIZE, *_HOSTS))


@dataclass
class ShownRanks:
    """The environment of this process, which speaks of the replicas inside of a run.

    Only variables that are set are changed: none tells more than the launcher did. Processes that
    are started inside, such as the workers of loaders, inherit them.
    """

    _changed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def show(self, variables: Mapping[str, int]) -> None:
        """From now on these are the values of the variables that are set."""
        self.restore()
        for name, value in variables.items():
            before = os.environ.get(name)
            if before is not None:
                self._changed[name] = before, str(value)
                os.environ[name] = str(value)

    def restore(self) -> None:
        """Put back the launcher's, but for what somebody else has changed meanwhile."""
        while self._changed:
            name, (before, shown) = self._changed.popitem()
            if os.environ.get(name) == shown:
                os.environ[name] = before


_Environ = type(os.environ)


class _Heard(_Environ):  # type: ignore[misc,valid-type]
    """An environment that says when sizes of the world are read from it."""

    listener: Callable[[str], None] | None = None

    def __getitem__(self, key: str) -> str:
        value: str = super().__getitem__(key)
        if key in _SIZES and _Heard.listener is not None and not asked_by_framework():
            _Heard.listener(f"os.environ[{key!r}]")
        return value


def hear_of_reads(listener: Callable[[str], None] | None) -> None:
    """Call ``listener`` when the user's code reads a size of the world; ``None``: no more."""
    _Heard.listener = listener
    # everybody has imported this one object: another one in its place would hear nothing
    os.environ.__class__ = _Environ if listener is None else _Heard


_WAYS = ("os", "collections.abc", "_collections_abc", __name__)
_ASKED_THROUGH = {"world_size", "num_devices", "device_ids", "num_nodes"}
"""Properties of the Trainer that ask its strategy."""


def asked_by_framework() -> bool:
    """Whether Lightning, torch or this package asks, and not the user's code.

    Callbacks of Lightning's keep what they are told, as those of users do.
    """
    for name, function in _callers():
        if name in _WAYS or name.startswith("lightning_hybrid."):
            continue
        own, callbacks = (f"{pytorch.__name__}.{room}" for room in ("", "callbacks."))
        if name == f"{own}trainer.trainer" and function in _ASKED_THROUGH:
            continue
        if name.startswith(("torch.", "torchmetrics.", f"{fabric.__name__}.")):
            return True
        return name.startswith(own) and not name.startswith(callbacks)
    return True


def _callers() -> Iterator[tuple[str, str]]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        frame = frame.f_back


def refuse_other_shards(loader: Any, launched: int, all_ranks: int, world: ReplicaWorld) -> None:
    """Complain about a loader that leaves the samples of the stages' ranks to them.

    Args:
        loader: that drivers are to take batches from.
        launched: number of this process among all.
        all_ranks: number of all processes.
        world: of the replicas.

    Raises:
        PlanError: its sampler or data set was made for all processes, before the run.
    """
    batches = getattr(loader, "batch_sampler", None)
    parts = (getattr(loader, "dataset", None), getattr(loader, "sampler", None), batches)
    for part in (*parts, getattr(batches, "sampler", None)):
        # `datasets` keeps them in a record of their own
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
                    "would be lost. Make it inside of the run (in train_dataloader or setup), by "
                    "trainer.world_size and trainer.global_rank or by the environment there; or "
                    "leave it to Lightning, which adds a DistributedSampler by itself."
                )
