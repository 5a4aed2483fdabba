"""The process groups between the R x S ranks of a run.

Every group but the drivers' is a process group of its own over one ``TCPStore``, used by its own
methods and shut down by us. The default group of ``torch.distributed`` belongs to the drivers
alone (rank = replica), because Lightning and torchmetrics call collectives on it; workers have
none, so that a stray collective there raises instead of hanging. One replica is one device, and
has none either: with it Lightning would give advice about metrics of several devices.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid._torch.distributed import set_timeout
from lightning_hybrid.comm.connections import (
    UNKNOWN_PEER,
    ConnectionLost,
    Group,
    GroupWire,
    Wire,
    start,
    wait,
)
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.network_interface import chosen_interface
from lightning_hybrid.comm.replica_channels import EdgeWires, Lines
from lightning_hybrid.comm.threads import BackgroundThread
from lightning_hybrid.errors import PlanError

CPU = torch.device("cpu")
# One rank may prepare data for hours while the others wait for it before a run, not for longer.
WORLD_TIMEOUT = timedelta(days=1)
_LEAVING_S = 2.0
_TAGS_OF_A_PLACEMENT = 2**12
"""More than a placement has edges: tags below that are for words."""


class GroupHandle:
    """A process group that can be given up while others still refer to it.

    gloo wakes nobody when a group is shut down or aborted, but the sockets of a group that is
    destroyed are closed, and that wakes every peer. NCCL waits for its peers in a shutdown, and
    ends what waits on the device in an abort.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lost: ConnectionLost | None = None

    def __getattr__(self, name: str) -> Any:
        if self._lost is not None:
            raise self._lost
        if self._group is None:
            raise RuntimeError("This rank has left the run, which has failed: it talks to nobody.")
        return getattr(self._group, name)

    def close(self) -> None:
        """Shut the group down, together with its other ranks, and give it up."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abort(self, lost: ConnectionLost | None = None) -> None:
        """Give the group up at once, whatever is under way in it; from any thread.

        Args:
            lost: what its operations raise from now on.
        """
        if self._group is not None:
            # whoever calls from now on gets the reason, not the error of a group that is torn down
            self._lost = lost
        group, self._group = self._group, None
        if group is not None:
            group.abort()


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
    # groups of one store must not find each other's addresses
    store = dist.PrefixStore(name, store)
    if backend != "nccl":
        with chosen_interface():
            return GroupHandle(dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    return GroupHandle(dist.ProcessGroupNCCL(store, rank, size, options))


def backend_on(device: torch.device, name: str) -> str:
    """The backend for tensors of a device.

    Args:
        device: of a rank.
        name: what ``process_group_backend`` is: of one backend, or of one for each kind of device,
            as in ``"cpu:gloo,cuda:nccl"``.

    Raises:
        PlanError: it is another one than can be used.
    """
    pairs = (pair.partition(":") for pair in name.replace(" ", "").lower().split(","))
    named = {kind if backend else device.type: backend or kind for kind, _, backend in pairs}
    wanted = {"cpu": "gloo", "cuda": "nccl"}.get(device.type)
    if wanted is None or named.get(device.type) != wanted:
        raise PlanError(
            f"process_group_backend={name!r} names {named.get(device.type, 'no backend')} for "
            f"tensors on {device.type!r}. Between stages and replicas tensors of CPUs travel by "
            "gloo, those of CUDA devices by nccl: leave the argument out."
        )
    return wanted


def make_world(store: dist.Store, rank: int, size: int) -> GroupHandle:
    """The group of all ranks, for what comes before and after a run; a day is its time-out."""
    return make_group(store, "world", rank, size, "gloo", WORLD_TIMEOUT)


class Mesh(Lines):
    """The process groups of one rank. All ranks construct it together.

    Args:
        coordinates: this rank.
        store: one store for all ranks.
        world: the group of all ranks; see :func:`make_world`.
        backend: of tensors on the device, as :func:`backend_on` takes it.
        timeout: of all groups but ``world``.
        name: of the mesh, another one for each that the store sees.
        device: of this rank's stages.

    Attributes:
        backend: of the links and the data-parallel groups, ``"gloo"`` or ``"nccl"``.
        world: gloo over all ranks, for barriers before and after a run. It is not the mesh's own:
            it is there before any rank has coordinates.
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
        name: str = "mesh",
        device: torch.device = CPU,
    ) -> None:
        super().__init__(coordinates)
        self.store, self.world = store, world
        self.backend, self.timeout = backend_on(device, backend), timeout
        self._named = backend
        self._store = dist.PrefixStore(name, store)
        self._device = device
        self._groups: list[GroupHandle] = []
        self._on_device: list[GroupHandle] = []
        self._statistics: Group = None
        self._of_copies: dict[str, Group] = {}
        dp_rank, pp_rank = coordinates.dp_rank, coordinates.pp_rank
        ranks, replicas = coordinates.ranks_per_replica, coordinates.replicas
        # on all ranks in this order: each waits in the store for the others of its group
        self.control = self._group(f"control{dp_rank}", pp_rank, ranks, "gloo")
        self.data_parallel = self._replica_group("data")
        self.drivers: Group = None
        if coordinates.is_driver:
            self.drivers = self._group("drivers", dp_rank, replicas, "gloo")
        self._rings: dict[tuple[int, ...], Mapping[int, EdgeWires]] = {}
        self.wires(coordinates.chain)

    def wires(self, devices: Sequence[int]) -> Mapping[int, EdgeWires]:
        """See :meth:`Lines.wires`.

        The groups of a chain exist from the beginning. Others are made when they are asked for;
        each rank makes its edges in rising order, so that no two ranks wait for each other. An edge
        has two groups, since two directions on one NCCL communicator wait for each other. A byte
        goes over each of them here: NCCL makes a communicator in the first operation, in which each
        end waits for the other one. In a pass ends come in another order, and might do so in a
        circle.
        """
        devices, here = tuple(devices), self.coordinates
        # networks of one placement share their groups
        if devices in self._rings:
            return self._rings[devices]
        placement = "-".join(map(str, devices))
        wires: dict[int, EdgeWires] = {}
        first_tag = (1 + len(self._rings)) * _TAGS_OF_A_PLACEMENT
        for edge, ends in enumerate(zip(devices, (*devices[1:], devices[0]))):
            if here.pp_rank in ends and ends[0] != ends[1]:
                me = ends.index(here.pp_rank)  # the sender of the activations is 0
                peer = str(here.at(ends[1 - me]))
                name = f"{here.dp_rank}.{placement}.{edge}"
                activations = self._device_group(f"activations{name}", me, 2)
                gradients = self._device_group(f"gradients{name}", me, 2)
                wires[edge] = EdgeWires(
                    GroupWire(activations, 1 - me, peer),
                    GroupWire(gradients, 1 - me, peer),
                    self.wire(ends[1 - me], first_tag + edge),
                )
                self._meet(wires[edge], sends_activations=me == 0)
        self._rings[devices] = wires
        return wires

    def _meet(self, wires: EdgeWires, *, sends_activations: bool) -> None:
        """Let a byte go over an edge, with the rank at its other end."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        forth, back = wires.activations, wires.gradients
        for wire, sends in ((forth, sends_activations), (back, not sends_activations)):
            (wire.send(byte) if sends else wire.receive(byte)).wait()

    def wire(self, pp_rank: int, tag: int) -> Wire:
        return GroupWire(self.control, pp_rank, str(self.coordinates.at(pp_rank)), tag)

    def _group(self, name: str, rank: int, size: int, backend: str) -> GroupHandle:
        group = make_group(self._store, name, rank, size, backend, self.timeout)
        self._groups.append(group)
        return group

    def _device_group(self, name: str, rank: int, size: int) -> GroupHandle:
        """A group for tensors on the device of the stages."""
        group = self._group(name, rank, size, self.backend)
        self._on_device.append(group)
        return group

    def _replica_group(self, name: str) -> GroupHandle:
        """The ranks with this `pp_rank`, which have met in it."""
        here = self.coordinates
        group = self._device_group(f"{name}{here.pp_rank}", here.dp_rank, here.replicas)
        self._meet_all(group)
        return group

    def _meet_all(self, group: Group) -> None:
        met = torch.zeros(1, device=self._device)
        wait(start(group.allreduce, [met], peer=UNKNOWN_PEER), UNKNOWN_PEER)

    def statistics(self) -> Group:
        """A group like `data_parallel`, for batch normalisation; made on first use."""
        if self._statistics is None:
            self._statistics = self._replica_group("statistics")
        return self._statistics

    def owners(self, copies: Sequence[int]) -> Group:
        """The ranks that have a stage, in all replicas; those of a stage call it together.

        Args:
            copies: ``pp_rank`` of each of its copies.
        """
        if len(copies) == 1:
            return self.data_parallel
        here = self.coordinates
        place = here.dp_rank * len(copies) + copies.index(here.pp_rank)
        return self._copies_group("owners", copies, place, here.replicas * len(copies))

    def siblings(self, copies: Sequence[int]) -> Group:
        """Some copies of a stage in this replica, which call it together; see :meth:`owners`."""
        place = copies.index(self.coordinates.pp_rank)
        replica = f"siblings{self.coordinates.dp_rank}."
        return self._copies_group(replica, copies, place, len(copies))

    def _copies_group(self, kind: str, copies: Sequence[int], rank: int, size: int) -> Group:
        """Made on first use; its ranks have met in it."""
        name = kind + "-".join(map(str, copies))
        if name not in self._of_copies:
            group = self._device_group(name, rank, size)
            self._meet_all(group)
            self._of_copies[name] = group
        return self._of_copies[name]

    def init_default_group(self) -> None:
        """Make the default group of several drivers, by public API; nothing on a worker."""
        here = self.coordinates
        if not here.is_driver or here.replicas == 1 or dist.is_initialized():
            return
        with chosen_interface():
            dist.init_process_group(
                self._named,
                store=dist.PrefixStore("default", self._store),
                rank=here.dp_rank,
                world_size=here.replicas,
                timeout=self.timeout,
                # NCCL takes its device from here, and else guesses it from the rank
                device_id=None if self._device.type == "cpu" else self._device,
            )

    def __deepcopy__(self, memo: object) -> "Mesh":
        """Whoever copies a Trainer in the middle of a run copies what refers to this rank."""
        return self

    def shutdown(self) -> None:
        """Close every group of ours but `world`; all ranks do so, in the same order.

        The default group is Lightning's to destroy.
        """
        # NCCL waits for its peers in each, so another order on another rank would hang
        for group in self._groups:
            group.close()
        self._groups.clear()

    def abort(self, lost: ConnectionLost | None = None) -> None:
        """End what waits for other ranks on the device; from any thread.

        Args:
            lost: what the operations of these groups raise from now on.
        """
        for group in self._on_device:
            group.abort(lost)
        # a collective of Lightning's may be waiting as well
        if dist.is_initialized() and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def leave(self) -> None:
        """After a failure of this rank: wake the ranks that wait for tensors or collectives of it.

        (Ranks of the same replica that wait for messages are told, since they listen.)
        """

        def close() -> None:
            self.abort()
            if self.drivers is not None:
                self.drivers.close()
            if dist.is_initialized():
                dist.destroy_process_group()

        # a group whose collective has begun ends with it, or with the time-out
        thread = BackgroundThread(close, "hybrid-leave", awaited=True)
        with suppress(MemoryError):  # the end of this process wakes them, too
            thread.start()
            thread.join(_LEAVING_S)
