"""The R x S mesh of ranks, and the process groups between them.

::

                 pp_rank 0      pp_rank 1      pp_rank 2
                 driver         worker         worker
                 last stage     stage 0        stage 1
    dp_rank 0    rank 0         rank 1         rank 2
    dp_rank 1    rank 3         rank 4         rank 5

Here each rank has one stage. Under a free placement a rank has several, and more edges lead to
other ranks: their groups are made when the network is cut (:meth:`Mesh.ring`).

Every group but the drivers' is a process group of its own over one ``TCPStore``, used by its own
methods and shut down by us. The default group of ``torch.distributed`` belongs to the drivers
alone (rank = replica), because Lightning and torchmetrics call collectives on it; workers have
none, so that a stray collective there raises instead of hanging. One replica is one device, and
has none either: with it Lightning would give advice about metrics of several devices.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.channel import Channel
from lightning_hybrid.comm.failure import Failure
from lightning_hybrid.comm.protocol import Leaving
from lightning_hybrid.comm.transport import ConnectionLost, Group, GroupWire
from lightning_hybrid.errors import PlanError

# One rank may prepare data for hours while the others wait for it before a run.
NO_TIMEOUT = timedelta(days=3650)
_LEAVING_S = 2.0


class GroupHandle:
    """A process group that can be given up while others still refer to it.

    gloo wakes nobody when a group is shut down or aborted, but the sockets of a group that is
    destroyed are closed, and that wakes every peer.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if self._group is None:
            raise RuntimeError("This rank has left the run, which has failed: it talks to nobody.")
        return getattr(self._group, name)

    def close(self) -> None:
        """Shut the group down and give it up."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in the mesh of ``replicas`` x ``ranks_per_replica`` ranks.

    Attributes:
        rank: number of the process.
        replicas: number of replicas.
        ranks_per_replica: each has one stage, or several under a free placement.
        order: the rank that has each index in the mesh, where that is not the index itself; see
            :mod:`lightning_hybrid.planning.cluster`.
        free: whether ranks may have several stages, so that coordinates do not tell which.
    """

    rank: int
    replicas: int
    ranks_per_replica: int
    order: tuple[int, ...] = ()
    free: bool = False

    def __post_init__(self) -> None:
        size = self.replicas * self.ranks_per_replica
        if not 0 <= self.rank < size:
            raise PlanError(
                f"rank {self.rank} is outside of replicas({self.replicas}) x "
                f"stages({self.ranks_per_replica}) = {size} ranks."
            )

    @property
    def index(self) -> int:
        """Index in the mesh, replica by replica."""
        return self.order.index(self.rank) if self.order else self.rank

    @property
    def dp_rank(self) -> int:
        """Number of the replica."""
        return self.index // self.ranks_per_replica

    @property
    def pp_rank(self) -> int:
        """Index inside the replica: 0 is the driver, k a worker, in a chain that of stage k - 1."""
        return self.index % self.ranks_per_replica

    def at(self, pp_rank: int) -> "Coordinates":
        """The coordinates of another rank of this replica."""
        index = self.index - self.pp_rank + pp_rank
        return replace(self, rank=self.order[index] if self.order else index)

    @property
    def is_driver(self) -> bool:
        """Whether the rank runs the user's code."""
        return self.pp_rank == 0

    @property
    def chain(self) -> tuple[int, ...]:
        """``pp_rank`` of each stage where every rank has one: the driver has the last."""
        return (*range(1, self.ranks_per_replica), 0)

    @property
    def lightning_rank(self) -> int:
        """What Lightning sees: drivers are 0 .. R-1, workers R .. R*S-1; unique over all."""
        if self.is_driver:
            return self.dp_rank
        workers = self.ranks_per_replica - 1
        return self.replicas + self.dp_rank * workers + self.pp_rank - 1

    def __str__(self) -> str:
        role = "driver" if self.is_driver else "worker"
        stage = "" if self.free else f", stage {(self.pp_rank - 1) % self.ranks_per_replica}"
        return f"rank {self.rank} ({role}, replica {self.dp_rank}{stage})"


def make_group(
    store: dist.Store, name: str, rank: int, size: int, backend: str, timeout: timedelta
) -> GroupHandle:
    """A process group of its own; its ranks call this together.

    Args:
        store: of all ranks.
        name: of the group, another one for each.
        rank: of this process in the group.
        size: number of its ranks.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: of its operations.
    """
    store = dist.PrefixStore(name, store)
    if backend != "nccl":
        return GroupHandle(dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return GroupHandle(dist.ProcessGroupNCCL(store, rank, size, options))


def make_world(store: dist.Store, rank: int, size: int) -> GroupHandle:
    """The group of all ranks, for what comes before and after a run, however long it takes."""
    return make_group(store, "world", rank, size, "gloo", NO_TIMEOUT)


class Mesh:
    """The process groups of one rank. All ranks construct it together.

    Args:
        coordinates: this rank.
        store: one store for all ranks.
        world: the group of all ranks; see :func:`make_world`.
        backend: of the links and of the stage groups, ``"gloo"`` or ``"nccl"``.
        timeout: of all groups but ``world``.

    Attributes:
        coordinates: this rank.
        world: gloo over all ranks, for barriers before and after a run.
        control: gloo over the ranks of one replica; commands, answers, words.
        drivers: gloo over the drivers (``None`` on workers), for objects and CPU tensors.
        data_parallel: over the ranks of all replicas with this ``pp_rank``, which have the same
            stages; for gradients and buffers.
    """

    def __init__(
        self,
        coordinates: Coordinates,
        store: dist.Store,
        world: GroupHandle,
        backend: str,
        timeout: timedelta,
    ) -> None:
        self.store, self.world = store, world
        self.backend, self.timeout = backend, timeout
        self._groups = [world]
        self._statistics: Group = None
        self.coordinates = coordinates
        dp_rank, pp_rank = coordinates.dp_rank, coordinates.pp_rank
        ranks, replicas = coordinates.ranks_per_replica, coordinates.replicas
        self.control = self._group(f"control{dp_rank}", pp_rank, ranks, "gloo")
        self.data_parallel = self._group(f"data{pp_rank}", dp_rank, replicas, backend)
        self.drivers: Group = None
        if coordinates.is_driver:
            self.drivers = self._group("drivers", dp_rank, replicas, "gloo")
        self._channels: dict[tuple[int, int], Channel] = {}
        self._rings: dict[tuple[int, ...], Mapping[int, tuple[Group, Group]]] = {}
        self.ring(coordinates.chain)

    def ring(self, devices: Sequence[int]) -> Mapping[int, tuple[Group, Group]]:
        """The groups of the ring driver -> stage 0 -> ... -> last stage = driver, for a placement.

        Edge k leads from stage k to the next one, or from the last to stage 0. It has one group of
        two ranks for activations and one for gradients, since two directions on one NCCL
        communicator wait for each other. The ring of a chain exists from the beginning. Others are
        made when they are asked for, which all ranks of a replica do together; each makes its edges
        in rising order, so that no two ranks wait for each other.

        Args:
            devices: ``pp_rank`` of each stage.

        Returns:
            By number, the groups of the edges between this rank and another one.
        """
        devices, here = tuple(devices), self.coordinates
        if devices in self._rings:
            return self._rings[devices]
        placement = "-".join(map(str, devices))
        groups = {}
        for edge, ends in enumerate(zip(devices, (*devices[1:], devices[0]))):
            if here.pp_rank in ends and ends[0] != ends[1]:
                me = ends.index(here.pp_rank)  # the sender of the activations is 0
                activations, gradients = (
                    self._group(f"{kind}{here.dp_rank}.{placement}.{edge}", me, 2, self.backend)
                    for kind in ("activations", "gradients")
                )
                groups[edge] = activations, gradients
        self._rings[devices] = groups
        return groups

    def channel(self, pp_rank: int, tag: int = 0) -> Channel:
        """A channel to another rank of this replica: the same one whenever it is asked for.

        Args:
            pp_rank: of the other rank.
            tag: 0 for commands and answers; channels of other tags to the same rank are queues of
                their own.
        """
        if (pp_rank, tag) not in self._channels:
            wire = GroupWire(self.control, pp_rank, str(self.coordinates.at(pp_rank)), tag)
            self._channels[pp_rank, tag] = Channel(wire)
        return self._channels[pp_rank, tag]

    def say_goodbye(self, failure: Failure) -> None:
        """This rank has failed: peers of this replica that wait for a message of it raise that.

        Peers that are gone themselves are passed over.
        """
        if self.coordinates.ranks_per_replica > 1 and not self.coordinates.is_driver:
            self.channel(0)  # the driver may wait for its first answer
        for channel in self._channels.values():
            with suppress(ConnectionLost):
                channel.send(Leaving(failure))

    def _group(self, name: str, rank: int, size: int, backend: str) -> Group:
        group = make_group(self.store, name, rank, size, backend, self.timeout)
        self._groups.append(group)
        return group

    def statistics(self) -> Group:
        """A group like `data_parallel`, for batch normalisation; made on first use."""
        if self._statistics is None:
            here = self.coordinates
            name = f"statistics{here.pp_rank}"
            self._statistics = self._group(name, here.dp_rank, here.replicas, self.backend)
        return self._statistics

    def init_default_group(self, backend: str, device: torch.device) -> None:
        """Make the default group of several drivers, by public API; nothing on a worker."""
        here = self.coordinates
        if not here.is_driver or here.replicas == 1 or dist.is_initialized():
            return
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default", self.store),
            rank=here.dp_rank,
            world_size=here.replicas,
            timeout=self.timeout,
            device_id=None if device.type == "cpu" else device,
        )

    def __deepcopy__(self, memo: object) -> "Mesh":
        """Whoever copies a Trainer in the middle of a run copies what refers to this rank."""
        return self

    def shutdown(self) -> None:
        """Close every group of ours; the default group is Lightning's to destroy."""
        for group in self._groups:
            group.close()
        self._groups.clear()

    def leave(self) -> None:
        """After a failure of this rank: wake the ranks of other replicas that wait for it.

        They wait in collectives: of the drivers, or of a data-parallel group. (Ranks of the same
        replica are told, since they listen.)
        """
        groups = [group for group in (self.drivers, self.data_parallel, self._statistics) if group]

        def close() -> None:
            for group in groups:
                group.close()
            if dist.is_initialized():
                dist.destroy_process_group()

        # a group whose collective has begun ends with it, or with the time-out
        thread = threading.Thread(target=close, daemon=True, name="hybrid-leave")
        thread.start()
        thread.join(_LEAVING_S)
