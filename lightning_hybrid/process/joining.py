"""How a process joins the others: one store, then the group of all ranks, then the mesh.

The first two need no sizes (:func:`gather`); the mesh is for replicas and stages that are known
(:func:`join`), which may be as late as the set-up of a run. What this process has joined is kept
between Trainers: a second run uses the same group of all ranks, and with the same sizes the same
mesh. The store ends with the process that has opened it.
"""

import atexit
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_hybrid.comm import Coordinates, Group, GroupHandle, Mesh, bound_to, make_world
from lightning_hybrid.errors import HybridError
from lightning_hybrid.planning import Cluster
from lightning_hybrid.process.children import have_met, miss_nobody
from lightning_hybrid.process.starts import of_this_start

LETTING_GO_S = 0.2
"""How long a process waits, in seconds, between the last operation of its groups and its end.

Gloo says that an operation is over a moment before its thread has let go of it. A script that ends
within that moment takes the interpreter away from the thread, and C++ aborts the process: 18 of 170
that ended right after an all-reduce did so (torch 2.13), none of 45 that waited for 50 ms. Torch
has no call that waits for the thread, and leaves such processes to crash:
https://github.com/pytorch/pytorch/issues/190489."""

MEETING_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Meeting:
    """Where and how all ranks find each other, the same on each of them but for ``serve``.

    Attributes:
        address: host of the store.
        port: port of the store.
        hosts: number of hosts.
        serve: whether this rank hosts the store (rank 0, unless the launcher's agent already does).
        outlives: whether the store outlives the ranks: the agent does, and may start them again.
    """

    address: str
    port: int
    hosts: int
    serve: bool
    outlives: bool = False


def make_store(meeting: Meeting, timeout: timedelta = MEETING_TIMEOUT) -> dist.TCPStore:
    """Host the store on the interface that the run needs, or connect to it.

    Args:
        meeting: where it is.
        timeout: how long to wait for the others.
    """
    address, port = meeting.address, meeting.port
    if not meeting.serve:
        return dist.TCPStore(address, port, None, False, timeout=timeout)
    listening = bound_to(address, port, meeting.hosts)
    return dist.TCPStore(address, port, None, True, timeout=timeout, master_listen_fd=listening)


def _store_beside(size: int, meeting: Meeting) -> dist.TCPStore:
    """A store where a default group of all ranks exists, which is closed.

    A launcher such as Ray has made it, or the script. Its own store may have the port that all
    were given, so this one gets another, which ranks hear over the group. Inside of a run the
    default group is that of the drivers.

    Args:
        size: number of ranks.
        meeting: where they would meet without it.

    Raises:
        HybridError: others are in it.
    """
    if dist.get_world_size() != size:
        raise HybridError(
            f"The default group of torch.distributed, which was made before this run, has "
            f"{dist.get_world_size()} ranks, and this run {size} processes. Let it be one "
            "of all processes, or call torch.distributed.destroy_process_group() on each before."
        )
    store = None
    if not meeting.outlives:
        if meeting.serve:
            store = make_store(replace(meeting, port=0))
        port = [store.port if store is not None else 0]
        dist.broadcast_object_list(port)
        meeting = replace(meeting, port=port[0])
    dist.destroy_process_group()
    return make_store(meeting) if store is None else store


_LOOK_EVERY_S = 0.05

Survey = Callable[[Group], Cluster]
"""Looks at all devices over the group of all ranks."""


@dataclass(frozen=True)
class Everyone:
    """All ranks, who have met but may have no sizes yet.

    Attributes:
        coordinates: this rank, as it stands before anything is known of the devices.
        store: of all ranks.
        world: gloo over all ranks, for what comes before and after a run.
    """

    coordinates: Coordinates
    store: dist.Store
    world: GroupHandle


@dataclass(frozen=True)
class Joined:
    """What a process has joined.

    Attributes:
        mesh: its groups.
        cluster: the devices of all ranks; ``None``: nobody has looked.
    """

    mesh: Mesh
    cluster: Cluster | None


class _Process:
    """What this process keeps between Trainers.

    Attributes:
        store: that all runs use; ``None``: no run yet.
        everyone: all ranks, as they have met last.
        joined: the mesh of the last run; ``None``: there is none, or it was left.
        key: what the mesh was made for; empty: it is not used again.
        generation: number of groups and meshes made so far, part of their names.
        failed: whether the last run has: then all ranks meet anew.
    """

    store: dist.Store | None = None
    everyone: Everyone | None = None
    joined: Joined | None = None
    key: tuple[object, ...] = ()
    generation = 0
    failed = False


def has_met() -> bool:
    """Whether this process has threads, groups and all else that a first run begins with."""
    return _Process.everyone is not None


def gather(coordinates: Coordinates, meeting: Meeting) -> Everyone:
    """Meet all other ranks: as in the last run, unless that has failed.

    All ranks run the same script, so all count the same generations and agree on the names.

    Args:
        coordinates: this rank; of its sizes only their product must be right.
        meeting: where the ranks meet.
    """
    size = coordinates.replicas * coordinates.ranks_per_replica
    known = _Process.everyone
    if known is not None and not _Process.failed and known.world.size() == size:
        return replace(known, coordinates=coordinates)
    _leave_mesh()
    if known is not None:
        known.world.close()
    if _Process.store is None:
        atexit.register(_end)
        atexit.register(time.sleep, LETTING_GO_S)  # before the groups are closed
        met = dist.is_initialized()
        _Process.store = _store_beside(size, meeting) if met else make_store(meeting)
        if meeting.outlives:
            _Process.store = of_this_start(_Process.store, coordinates.rank, size, MEETING_TIMEOUT)
    _Process.generation += 1
    store = dist.PrefixStore(f"hybrid{_Process.generation}", _Process.store)
    if _Process.failed:
        _wait_for_all(store, coordinates.rank, size)
    world = make_world(store, coordinates.rank, size)
    have_met()
    _Process.everyone, _Process.failed = Everyone(coordinates, store, world), False
    return _Process.everyone


def _wait_for_all(store: dist.Store, rank: int, size: int) -> None:
    """After a failure: a group would wait for a rank that has not caught it, and has ended.

    Raises:
        RemoteError: there is one.
    """
    store.set(f"back {rank}", "")
    deadline = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    everyone = [f"back {each}" for each in range(size)]
    while not store.check(everyone) and time.monotonic() < deadline:
        miss_nobody()
        time.sleep(_LOOK_EVERY_S)


def join(
    everyone: Everyone,
    coordinates: Coordinates,
    *,
    backend: str,
    timeout: timedelta,
    device: torch.device,
    survey: Survey | None = None,
    capacity: Hashable = None,
) -> Joined:
    """Join the mesh: that of the last run if it had the same shape, else a new one.

    Args:
        everyone: all ranks.
        coordinates: this rank.
        backend: for tensors between stages and between replicas, as ``process_group_backend``.
        timeout: of those tensors' links.
        device: of this rank.
        survey: looks at the devices of all ranks, and may give ranks other coordinates.
        capacity: what the survey was told; another one needs another mesh.
    """
    key = (coordinates, backend, timeout, survey is None, capacity)
    if _Process.joined is not None and _Process.key == key:
        return _Process.joined
    _leave_mesh()
    cluster = None if survey is None else survey(everyone.world)
    if cluster is not None:
        coordinates = replace(coordinates, order=cluster.order)
    _Process.generation += 1
    name = f"mesh{_Process.generation}"
    mesh = Mesh(coordinates, everyone.store, everyone.world, backend, timeout, name, device)
    _Process.joined, _Process.key = Joined(mesh, cluster), key
    return _Process.joined


def _leave_mesh() -> None:
    """Give up the mesh of the last run, if there is one."""
    if _Process.joined is not None:
        _Process.joined.mesh.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
        _Process.joined, _Process.key = None, ()


def _end() -> None:
    """At the end of the process: close the groups, as torch asks for (NCCL complains, else)."""
    _leave_mesh()
    if _Process.everyone is not None:
        _Process.everyone.world.close()
        _Process.everyone = None


def forget() -> None:
    """After a failure the links hold half-sent messages: the next run makes new ones."""
    _Process.failed = True
    if _Process.joined is not None and _Process.key:
        _Process.key = ()
        _Process.joined.mesh.leave()
