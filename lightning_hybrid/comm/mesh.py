"""The process groups between the R x S ranks of a run.

The default group of ``torch.distributed`` belongs to the drivers alone (rank = replica), because
Lightning and torchmetrics call collectives on it; workers have none, so that a stray collective
there raises instead of hanging. With one replica there is no default group either: Lightning would
take the run for one of several devices, and give advice about their metrics. Every other group is a
separate process group over one ``TCPStore``, whose methods are called directly and which this
package shuts down.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_hybrid._torch.distributed import set_timeout
from lightning_hybrid.comm.connections import (
    UNKNOWN_PEER,
    ConnectionLost,
    Group,
    GroupHandle,
    GroupWire,
    Wire,
    start,
    wait,
)
from lightning_hybrid.comm.coordinates import Coordinates
from lightning_hybrid.comm.network_interface import chosen_interface
from lightning_hybrid.comm.replica_channels import EdgeWires, ReplicaWires
from lightning_hybrid.comm.survivors import Survivors
from lightning_hybrid.comm.tags import TAGS_OF_A_PLACEMENT, ReservedTag
from lightning_hybrid.comm.threads import BackgroundThread
from lightning_hybrid.errors import PlanError

CPU = torch.device("cpu")
# Before a run one rank may prepare data for hours while the others wait for it.
WORLD_TIMEOUT = timedelta(days=1)
_LEAVING_S = 2.0


def make_group(
    store: dist.Store, name: str, rank: int, size: int, backend: str, timeout: timedelta
) -> GroupHandle:
    """Make a process group, apart from the default one; all its ranks call this together.

    Args:
        store: store that all ranks share.
        name: name of the group, equal on its ranks; unique in the store.
        rank: index of this rank in the group.
        size: number of ranks in the group.
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: time-out of the group's operations.
    """
    # a prefix keeps the addresses of groups that share the store apart
    store = dist.PrefixStore(name, store)
    if backend != "nccl":
        with chosen_interface():
            return GroupHandle(dist.ProcessGroupGloo(store, rank, size, timeout))
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    return GroupHandle(dist.ProcessGroupNCCL(store, rank, size, options))


def backend_on(device: torch.device, name: str) -> str:
    """Choose the backend for tensors on a device: ``"gloo"`` for CPUs, ``"nccl"`` for CUDA.

    Args:
        device: device of a rank.
        name: the option ``process_group_backend``: one backend, or one for each kind of device, as
            in ``"cpu:gloo,cuda:nccl"``.

    Raises:
        PlanError: ``name`` gives another backend to this device.
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
    """Make the gloo group of all ranks, for use before and after a run; all ranks call it together.

    Args:
        store: store that all ranks share.
        rank: global rank of this process.
        size: number of all ranks.
    """
    return make_group(store, "world", rank, size, "gloo", WORLD_TIMEOUT)


class Mesh(ReplicaWires):
    """The process groups of one rank. All ranks construct it together.

    Args:
        coordinates: coordinates of this rank.
        store: store that all ranks share.
        world: the group of all ranks; see :func:`make_world`.
        backend: the option ``process_group_backend``; see :func:`backend_on`.
        timeout: time-out of all groups but ``world`` and ``scripts``.
        name: name of the mesh; unique in the store.
        device: device of this rank's stages.

    Attributes:
        device: device of this rank's stages.
        backend: backend of the links and the data-parallel groups, ``"gloo"`` or ``"nccl"``.
        world: gloo group over all ranks, for barriers before and after a run. It exists before any
            rank has coordinates, and :meth:`shutdown` does not close it.
        control: gloo group over the ranks of this replica, by ``pp_rank``; for commands and
            answers, for words (small messages between neighbouring stages,
            :class:`~lightning_hybrid.comm.protocol.StageMessage`), and for tensors between stages
            that stay on the CPU.
        drivers: gloo group over the drivers, by ``dp_rank``, for objects and CPU tensors; ``None``
            on workers.
        scripts: like ``drivers``, with the long time-out of ``world``, for barriers and broadcasts
            before and after a run: one driver possibly prepares data while the others wait.
        data_parallel: group over the ranks of all replicas with this ``pp_rank``, by ``dp_rank``;
            they have the same stages. For gradients and buffers.
        survivors: the replicas that go on if one is lost (``BySpeed(on_loss="continue")``);
            ``None``: the run ends if a replica is lost.
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
        self.store = store
        self.world = world
        self.survivors: Survivors | None = None
        self._runs = 0
        self.backend = backend_on(device, backend)
        self.timeout = timeout
        self._named = backend
        self._store = dist.PrefixStore(name, store)
        self._name = name
        self.device = device
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
        self.scripts: Group = None
        if coordinates.is_driver:
            self.drivers = self._group("drivers", dp_rank, replicas, "gloo")
            self.scripts = make_group(
                self._store, "scripts", dp_rank, replicas, "gloo", WORLD_TIMEOUT
            )
            self._groups.append(self.scripts)
        self._rings: dict[tuple[int, ...], Mapping[int, EdgeWires]] = {}
        self.wires(coordinates.chain)

    def wires(self, devices: Sequence[int]) -> Mapping[int, EdgeWires]:
        """See :meth:`ReplicaWires.wires`.

        The groups of a chain are made in the constructor, those of another placement in the first
        call for it. Each rank makes the groups of its edges in rising order, so that ranks do not
        wait for each other in a circle. An edge has two groups, since two directions on one NCCL
        communicator wait for each other. One byte is sent over each group here: NCCL makes a
        communicator in the first operation, in which each end waits for the other one. In a pass
        through the stages these waits could form a circle.
        """
        devices, here = tuple(devices), self.coordinates
        # networks with the same placement share the groups
        if devices in self._rings:
            return self._rings[devices]
        placement = "-".join(map(str, devices))
        wires: dict[int, EdgeWires] = {}
        first_tag = (1 + len(self._rings)) * TAGS_OF_A_PLACEMENT
        for edge, ends in enumerate(zip(devices, (*devices[1:], devices[0]))):
            if here.pp_rank in ends and ends[0] != ends[1]:
                me = ends.index(here.pp_rank)  # the sender of the activations is 0
                peer = str(here.at(ends[1 - me]))
                name = f"{here.dp_rank}.{placement}.{edge}"
                self._await([ends[1 - me]])
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

    def _await(self, others: Iterable[int]) -> None:
        """Wait until other ranks of this replica are about to make a group with this one.

        Who makes a group waits for the addresses of the others, up to the time-out of the store,
        and does not notice that one of them is gone.

        Args:
            others: their ``pp_rank``. Each calls this for all ranks of the group but itself.

        Raises:
            ConnectionLost: one of them is lost.
        """
        wires = [self.wire(rank, ReservedTag.ABOUT_TO_MAKE_A_GROUP) for rank in others]
        sent = torch.zeros(1, dtype=torch.uint8)
        received = [torch.zeros_like(sent) for _ in wires]
        transfers = [wire.send(sent) for wire in wires]
        transfers += [wire.receive(byte) for wire, byte in zip(wires, received)]
        for transfer in transfers:
            transfer.wait()

    def _meet(self, wires: EdgeWires, *, sends_activations: bool) -> None:
        """Exchange a byte with the rank at the other end of an edge, over both groups of the edge.

        Args:
            wires: the wires of the edge.
            sends_activations: whether this rank is the end that sends activations.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
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
        """Make a group for tensors on the stages' device; its ranks call this together.

        :meth:`abort` aborts it, and :meth:`shutdown` closes it.
        """
        group = self._group(name, rank, size, self.backend)
        self._on_device.append(group)
        return group

    def _replica_group(self, name: str) -> GroupHandle:
        """Make a group over the ranks of all replicas with this rank's ``pp_rank``, by ``dp_rank``.

        These ranks call it together.
        """
        here = self.coordinates
        group = self._device_group(f"{name}{here.pp_rank}", here.dp_rank, here.replicas)
        self._meet_all(group)
        return group

    def _meet_all(self, group: Group) -> None:
        # (float32 on all ranks: a training step possibly has set another default type)
        met = torch.zeros(1, dtype=torch.float32, device=self.device)
        wait(start(group.allreduce, [met], peer=UNKNOWN_PEER), UNKNOWN_PEER)

    def statistics(self) -> Group:
        """Return a group like `data_parallel`, for batch normalisation (``sync_batchnorm``).

        The first call makes the group; its ranks make this call together.
        """
        if self._statistics is None:
            self._statistics = self._replica_group("statistics")
        return self._statistics

    def owners(self, copies: Sequence[int]) -> Group:
        """Return the group of all ranks, of all replicas, that have a stage.

        Its ranks are in the order of the replicas, and in each replica in the order of ``copies``.
        They make the first call for ``copies`` together.

        Args:
            copies: ``pp_rank`` of each copy of the stage. For a stage without copies this is
                `data_parallel`.
        """
        if len(copies) == 1:
            return self.data_parallel
        here = self.coordinates
        place = here.dp_rank * len(copies) + copies.index(here.pp_rank)
        return self._copies_group("owners", copies, place, here.replicas * len(copies))

    def siblings(self, copies: Sequence[int]) -> Group:
        """Return a group of some ranks of this replica; they make the first such call together.

        The ranks are those with copies of a stage, or a worker and the driver.

        Args:
            copies: ``pp_rank`` of each of these ranks, in the order of the group; this rank must be
                one of them.
        """
        place = copies.index(self.coordinates.pp_rank)
        replica = f"siblings{self.coordinates.dp_rank}."
        if _group_name(replica, copies) not in self._of_copies:
            self._await([rank for rank in copies if rank != self.coordinates.pp_rank])
        return self._copies_group(replica, copies, place, len(copies))

    def _copies_group(self, kind: str, copies: Sequence[int], rank: int, size: int) -> Group:
        """Return a group on the stages' device, cached by ``kind`` and ``copies``.

        The first call is made by all its ranks together.

        Args:
            kind: first part of the group's name; distinguishes groups over the same ``copies``.
            copies: ``pp_rank`` of those ranks of the group that are in one replica.
            rank: index of this rank in the group.
            size: number of ranks in the group.
        """
        name = _group_name(kind, copies)
        if name not in self._of_copies:
            group = self._device_group(name, rank, size)
            self._meet_all(group)
            self._of_copies[name] = group
        return self._of_copies[name]

    def init_default_group(self) -> None:
        """Make the default group of ``torch.distributed`` over the drivers, which call it together.

        Does nothing on a worker, with one replica, and where a default group exists already.
        """
        here = self.coordinates
        if not here.is_driver or here.replicas == 1 or dist.is_initialized():
            return
        self._init_default_group("default", here.dp_rank, here.replicas)

    def _init_default_group(self, name: str, rank: int, size: int) -> None:
        with chosen_interface():
            dist.init_process_group(
                self._named,
                store=dist.PrefixStore(name, self._store),
                rank=rank,
                world_size=size,
                timeout=self.timeout,
                # without it NCCL would guess the device from the rank
                device_id=None if self.device.type == "cpu" else self.device,
            )

    def survive(self, *, survives: bool) -> None:
        """Before a run: set :attr:`survivors` for it. All ranks call it, with the same argument.

        Args:
            survives: whether the other replicas go on if one is lost during the run
                (``BySpeed(on_loss="continue")``).
        """
        self._runs += 1
        if not survives:
            self.survivors = None
            return
        here, run = self.coordinates, self._runs
        self.survivors = Survivors(
            here,
            self.store,
            self.drivers,
            f"{self._name} {run}",
            self.timeout,
            self._go_on_with,
        )

    def living_ranks(self, living: Sequence[int] | None = None) -> list[int]:
        """The global ranks of the processes of all replicas that are left, in rising order.

        Args:
            living: numbers of these replicas; ``None``: those of :attr:`survivors`, or all
                replicas.
        """
        here = self.coordinates
        if living is None:
            living = self.survivors.living if self.survivors else range(here.replicas)
        everyone = range(here.replicas * here.ranks_per_replica)
        return [rank for rank in everyone if replace(here, rank=rank).dp_rank in living]

    def _go_on_with(self, living: Sequence[int]) -> None:
        """Make the groups over replicas anew, after a replica was lost.

        All ranks of the replicas that are left call this together.

        Handles of the old groups get the new groups, so that whoever has a handle uses the new
        group.

        Args:
            living: numbers of the replicas that are left (``dp_rank``), in rising order.
        """
        here, name = self.coordinates, f"with {' '.join(map(str, living))}"
        index, size = list(living).index(here.dp_rank), len(living)
        made = make_group(
            self._store,
            f"{name} data{here.pp_rank}",
            index,
            size,
            self.backend,
            self.timeout,
        )
        self.data_parallel.replace(made)
        ranks = self.living_ranks(living)
        made = make_group(
            self._store,
            f"{name} world",
            ranks.index(here.rank),
            len(ranks),
            "gloo",
            WORLD_TIMEOUT,
        )
        self.world.replace(made)
        if not here.is_driver:
            return
        made = make_group(self._store, f"{name} drivers", index, size, "gloo", self.timeout)
        self.drivers.replace(made)
        made = make_group(self._store, f"{name} scripts", index, size, "gloo", WORLD_TIMEOUT)
        self.scripts.replace(made)
        if dist.is_initialized():
            dist.destroy_process_group()
            self._init_default_group(f"{name} default", index, size)

    def __deepcopy__(self, memo: object) -> "Mesh":
        """Return itself: a copy of a Trainer made during a run shares the groups of this rank."""
        return self

    def shutdown(self) -> None:
        """Close all groups that the mesh has made; all ranks call this together.

        `world` stays open, and the default group is destroyed by Lightning.
        """
        # in the same order on all ranks: NCCL waits for its peers in the shutdown of each group
        for group in self._groups:
            group.close()
        self._groups.clear()

    def abort(self, lost: ConnectionLost | None = None) -> None:
        """Abort all groups for tensors on the device, and the default group; from any thread.

        Args:
            lost: error that later uses of these groups raise; see :meth:`GroupHandle.abort`.
        """
        for group in self._on_device:
            group.abort(lost)
        # a collective of Lightning's may be waiting as well
        if dist.is_initialized() and dist.group.WORLD is not None:
            dist.group.WORLD.abort()

    def leave(self) -> None:
        """Close groups after a failure of this rank, which wakes ranks that wait for its tensors.

        Waits for at most two seconds. The control group stays open: ranks that wait for a message
        get the failure as a message (:meth:`ReplicaWires.say_goodbye`).
        """

        def close() -> None:
            self.abort()
            if self.drivers is not None:
                self.drivers.close()
            if dist.is_initialized():
                dist.destroy_process_group()

        # in a thread: closing a group may wait for its running collective until the time-out
        thread = BackgroundThread(close, "hybrid-leave", awaited=True)
        with suppress(MemoryError):  # without it, the end of this process wakes them
            thread.start()
            thread.join(_LEAVING_S)


def _group_name(kind: str, copies: Sequence[int]) -> str:
    return kind + "-".join(map(str, copies))
