"""Who is who: the R x S mesh of ranks, and the process groups between them.

::

                 position 0     position 1     position 2
                 driver         worker         worker
                 last stage     stage 0        stage 1
    replica 0    rank 0         rank 1         rank 2
    replica 1    rank 3         rank 4         rank 5

Every group but the drivers' is a process group of its own over one ``TCPStore``, used by its own
methods and shut down by us. The default group of ``torch.distributed`` belongs to the drivers
alone (rank = replica), because Lightning and torchmetrics call collectives on it; workers have
none, so that a stray collective there raises instead of hanging. One replica is one device, and
has none either: with it Lightning would give advice about metrics of several devices.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.cluster import Cluster

# One rank may prepare data for hours while the others wait for it before a run.
NO_TIMEOUT = timedelta(days=3650)
_STORE_TIMEOUT = timedelta(minutes=10)


Group = Any
"""A process group used by its own methods; those of gloo and NCCL have no public common type."""

Survey = Callable[[Group], Cluster]
"""Looks at all devices over the group of all ranks."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands in the mesh of ``replicas`` x ``stages`` ranks."""

    rank: int
    replicas: int
    stages: int
    order: tuple[int, ...] = ()
    """for each seat its rank, where ranks have changed places; see `planning.cluster`"""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.replicas * self.stages:
            raise PlanError(
                f"rank {self.rank} is outside of replicas({self.replicas}) x stages({self.stages})"
                f" = {self.replicas * self.stages} ranks."
            )

    @property
    def seat(self) -> int:
        """Index in the mesh, replica by replica: the rank, unless ranks have changed places."""
        return self.order.index(self.rank) if self.order else self.rank

    @property
    def replica(self) -> int:
        return self.seat // self.stages

    @property
    def position(self) -> int:
        """Index inside the replica: 0 is the driver, k the worker that owns stage k - 1."""
        return self.seat % self.stages

    def at(self, position: int) -> "Place":
        """The place of another rank of this replica."""
        seat = self.seat - self.position + position
        return replace(self, rank=self.order[seat] if self.order else seat)

    @property
    def is_driver(self) -> bool:
        return self.position == 0

    @property
    def stage(self) -> int:
        return (self.position - 1) % self.stages

    def position_of(self, stage: int) -> int:
        return (stage + 1) % self.stages

    @property
    def lightning_rank(self) -> int:
        """What Lightning sees: drivers are 0 .. R-1, workers R .. R*S-1; unique over all."""
        if self.is_driver:
            return self.replica
        return self.replicas + self.replica * (self.stages - 1) + self.position - 1

    def __str__(self) -> str:
        role = "driver" if self.is_driver else "worker"
        return f"rank {self.rank} ({role}, replica {self.replica}, stage {self.stage})"


class Mesh:
    """The process groups of one rank. All ranks construct it together.

    Args:
        place: this rank.
        survey: looks at the devices of all ranks, over ``world``, and may make ranks change places.
        store: one store for all ranks.
        backend: of the links and of the stage groups, ``"gloo"`` or ``"nccl"``.
        timeout: of the links, the stage groups and the drivers' default group.

    Attributes:
        place: this rank.
        cluster: the devices of all ranks; ``None``: nobody has looked.
        world: gloo over all ranks, for barriers before and after a run.
        control: gloo over the ranks of one replica; commands, answers, headers. No time-out.
        drivers: gloo over the drivers (``None`` on workers), for objects and CPU tensors.
        copies: over the R copies of this rank's stage, for gradients and buffers.
        activations_in, activations_out, gradients_in, gradients_out: one group per direction of
            each edge of the ring driver -> stage 0 -> ... -> last stage = driver, since two
            directions on one NCCL communicator wait for each other. ``None`` without stages.
    """

    def __init__(
        self,
        place: Place,
        store: dist.Store,
        backend: str,
        timeout: timedelta,
        survey: Survey | None = None,
    ) -> None:
        self.store = store
        self.key: tuple[object, ...] = ()
        self.backend = backend
        self.timeout = timeout
        self._groups: list[Group] = []
        self._statistics: Group = None
        self.world = self._group("world", place.rank, place.replicas * place.stages, "gloo")
        self.cluster = None if survey is None else survey(self.world)
        if self.cluster is not None:
            place = replace(place, order=self.cluster.order)
        self.place = place
        replica, position = place.replica, place.position
        self.control = self._group(f"control{replica}", position, place.stages, "gloo")
        self.copies = self._group(f"copies{position}", replica, place.replicas, backend)
        self.drivers: Group = None
        if place.is_driver:
            self.drivers = self._group("drivers", replica, place.replicas, "gloo")
        self._make_ring()

    def _make_ring(self) -> None:
        """Two groups of two ranks per edge; edge e leads from position e to e + 1.

        Every rank makes its edges in rising order, so that no two ranks wait for each other.
        """
        stages, position = self.place.stages, self.place.position
        groups: dict[str, Group] = dict.fromkeys(
            ("activations_in", "activations_out", "gradients_in", "gradients_out")
        )
        for edge in range(stages if stages > 1 else 0):
            if position not in (edge, (edge + 1) % stages):
                continue
            sender = position == edge
            for kind in ("activations", "gradients"):
                name = f"{kind}{self.place.replica}.{edge}"
                group = self._group(name, 0 if sender else 1, 2, self.backend)
                outward = sender == (kind == "activations")
                groups[f"{kind}_{'out' if outward else 'in'}"] = group
        self.activations_in = groups["activations_in"]
        self.activations_out = groups["activations_out"]
        self.gradients_in = groups["gradients_in"]
        self.gradients_out = groups["gradients_out"]

    def _group(self, name: str, rank: int, size: int, backend: str) -> Group:
        store = dist.PrefixStore(name, self.store)
        timeout = NO_TIMEOUT if name == "world" else self.timeout
        group: Group
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._groups.append(group)
        return group

    def statistics(self) -> Group:
        """A group like `copies`, for the statistics of batch normalisation; made on first use."""
        if self._statistics is None:
            replica, position = self.place.replica, self.place.position
            name = f"statistics{position}"
            self._statistics = self._group(name, replica, self.place.replicas, self.backend)
        return self._statistics

    def init_default_group(self, backend: str, device: torch.device) -> None:
        """Make the default group of several drivers, by public API; nothing on a worker."""
        if not self.place.is_driver or self.place.replicas == 1 or dist.is_initialized():
            return
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", self.store),
            rank=self.place.replica,
            world_size=self.place.replicas,
            timeout=self.timeout,
            device_id=None if device.type == "cpu" else device,
        )

    def shutdown(self) -> None:
        """Close every group of ours; the default group is Lightning's to destroy."""
        for group in self._groups:
            group.shutdown()
        self._groups.clear()


class _Process:
    """What this process keeps between Trainers: one store, the mesh in use, how many were made."""

    store: dist.TCPStore | None = None
    mesh: Mesh | None = None
    generation = 0


def join_mesh(
    place: Place,
    address: str,
    port: int,
    *,
    serve: bool,
    backend: str,
    timeout: timedelta,
    survey: Survey | None = None,
    capacity: Hashable = None,
) -> Mesh:
    """The mesh of this process: the one of the last run if it has the same shape, else a new one.

    All ranks run the same script, so all count the same generations and agree on the names.

    Args:
        place: this rank.
        address: host of the store.
        port: port of the store.
        serve: whether this rank hosts it (rank 0, unless the launcher's agent already does).
        backend: ``"gloo"`` or ``"nccl"``, for tensors between stages and between replicas.
        timeout: of those tensors' links.
        survey: see :class:`Mesh`.
        capacity: what the survey was told; another one needs another mesh.
    """
    key = (place, backend, timeout, survey is None, capacity)
    if _Process.mesh is not None and _Process.mesh.key == key:
        return _Process.mesh
    if _Process.mesh is not None:
        _Process.mesh.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
    if _Process.store is None:
        _Process.store = dist.TCPStore(address, port, None, serve, timeout=_STORE_TIMEOUT)
    _Process.generation += 1
    store = dist.PrefixStore(f"hybrid{_Process.generation}", _Process.store)
    _Process.mesh = Mesh(place, store, backend, timeout, survey)
    _Process.mesh.key = key
    return _Process.mesh


def forget_mesh() -> None:
    """After a failure the links hold half-sent messages: the next run makes new ones."""
    if _Process.mesh is not None:
        _Process.mesh.key = ()
