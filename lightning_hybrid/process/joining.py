"""Join the other ranks: first one store, then the group of all ranks, then the mesh.

The first two need no sizes (:func:`meet_all`); the mesh needs the numbers of replicas and stages
(:func:`join`), which may be known as late as in the set-up of a run. All are kept between Trainers:
a second run uses the same group of all ranks, and with the same sizes the same mesh. The store ends
with the process that hosts it.
"""

import atexit
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_hybrid.comm import Coordinates, Group, GroupHandle, Mesh, bound_to, make_world
from lightning_hybrid.errors import HybridError, RemoteError
from lightning_hybrid.planning import Cluster
from lightning_hybrid.process.children import have_met, miss_nobody
from lightning_hybrid.process.starts import of_this_start

LETTING_GO_S = 0.2
"""How long a process waits, in seconds, between the last operation of its groups and its end.

Gloo reports that an operation is over a moment before its thread has released it. If the
interpreter ends within that moment, C++ aborts the process: 18 of 170 that ended right after an
all-reduce did so (torch 2.13), none of 45 that waited for 50 ms. Torch has no call that waits for
the thread: https://github.com/pytorch/pytorch/issues/190489."""

MEETING_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Meeting:
    """Where all ranks meet: the address of the store. All but ``serve`` is equal on all ranks.

    Attributes:
        address: host of the store.
        port: port of the store.
        hosts: number of hosts on which there are ranks.
        serve: whether this rank hosts the store (rank 0, unless the launcher's agent already does).
        outlives: whether the launcher's agent hosts the store: it outlives the ranks, and the agent
            may start them again.
    """

    address: str
    port: int
    hosts: int
    serve: bool
    outlives: bool = False


def make_store(meeting: Meeting, timeout: timedelta = MEETING_TIMEOUT) -> dist.TCPStore:
    """Host the store in this process, or connect to it, as ``meeting.serve`` says.

    A hosted store listens on the network interface by which the other ranks reach the address.

    Args:
        meeting: address of the store, and whether this rank hosts it.
        timeout: how long to wait for the other ranks, here and in later requests to the store.
    """
    address, port = meeting.address, meeting.port
    if not meeting.serve:
        return dist.TCPStore(address, port, None, False, timeout=timeout)
    listening = bound_to(address, port, meeting.hosts)
    return dist.TCPStore(address, port, None, True, timeout=timeout, master_listen_fd=listening)


def _store_beside(size: int, meeting: Meeting) -> dist.TCPStore:
    """Make the store where a default process group exists already, and destroy that group.

    Collective: all ranks call this together. The group was made by a launcher such as Ray, or by
    the script. Its store may use the port of ``meeting``, so this store gets another port, which
    rank 0 broadcasts over the group. The group is destroyed since during a run the default group is
    that of the drivers.

    Args:
        size: number of all ranks.
        meeting: where the ranks would meet without such a group.

    Raises:
        HybridError: the group has another number of ranks.
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
"""A function that surveys all devices, given the group of all ranks (collective over all ranks)."""


@dataclass(frozen=True)
class Everyone:
    """What a rank has when all ranks have met; numbers of replicas and stages may still be open.

    Attributes:
        coordinates: coordinates of this rank, which may change when it joins a mesh.
        store: store that all ranks share.
        world: gloo group of all ranks, for barriers and broadcasts before and after a run.
    """

    coordinates: Coordinates
    store: dist.Store
    world: GroupHandle


@dataclass(frozen=True)
class Joined:
    """What a rank has when it has joined a mesh.

    Attributes:
        mesh: the process groups of this rank.
        cluster: the devices of all ranks, and their order in the mesh; ``None``: no survey.
    """

    mesh: Mesh
    cluster: Cluster | None


class _Process:
    """What this process keeps between Trainers, as attributes of the class.

    Attributes:
        store: store that all runs use; ``None``: no run yet.
        everyone: what this rank has of the last meeting of all ranks; ``None``: they have not met.
        joined: the mesh of the last run; ``None``: there is none, or it was closed.
        key: arguments of :func:`join` for which the mesh was made; empty: it is not used again.
        generation: number of groups and meshes made so far, which is part of their names.
        failed: whether the last run has failed; then the next one makes new groups.
    """

    store: dist.Store | None = None
    everyone: Everyone | None = None
    joined: Joined | None = None
    key: tuple[object, ...] = ()
    generation = 0
    failed = False


@dataclass(frozen=True)
class History:
    """Which groups a rank has from earlier runs; rank 0 sends its own, for servers to follow.

    Attributes:
        generation: number of groups and meshes made so far.
        met: whether there is a group of all ranks that may be used again.
        meshed: whether the mesh of the last run may be used again.
        failed: whether the last run has failed.
    """

    generation: int
    met: bool
    meshed: bool
    failed: bool


def history() -> History:
    """Return which groups this process has from earlier runs."""
    met = _Process.everyone is not None
    return History(_Process.generation, met, bool(_Process.key), _Process.failed)


def drop_what_driver_lacks(driver: History) -> None:
    """On another rank, give up groups that rank 0 lacks, so that both make the next ones together.

    Closes the mesh, and the group of all ranks, where rank 0 has other ones or none. (There may
    have been runs without this rank.) Then counts generations as rank 0 does.

    Args:
        driver: what :func:`history` returns on rank 0.
    """
    same = driver.generation == _Process.generation
    if not (same and driver.meshed):
        forget()
        _leave_mesh()
    if not (same and driver.met):
        drop_group()
    _Process.generation, _Process.failed = driver.generation, driver.failed


def drop_group() -> None:
    """Give up this process's group of all ranks and its store, without waiting for other ranks.

    It is a group of gloo beside torch's default one. The next run makes another one. Nothing
    happens if there is none.
    """
    if _Process.everyone is not None:
        _Process.everyone.world.drop()
        _Process.everyone = None


def has_met() -> bool:
    """Whether this process has called :func:`reach`, and so is connected to the common store."""
    return _Process.everyone is not None


def reach(coordinates: Coordinates, meeting: Meeting) -> Everyone:
    """Get the store for a run, so that ranks can tell each other of failures from here on.

    All ranks call this at the start of a run. If the last run has not failed and had as many ranks,
    its store and group of all ranks are used again. Else they are made anew: here a part of the
    store under a new prefix, and then the group by :func:`meet_all`. All ranks run the same script
    and count generations alike, so they agree on the names of parts and groups.

    Args:
        coordinates: coordinates of this rank. The numbers of replicas and stages may be provisional
            if their product is the number of all ranks.
        meeting: where the ranks meet.

    Raises:
        RemoteError: a replica was lost in an earlier run.
    """
    size = coordinates.replicas * coordinates.ranks_per_replica
    known = _Process.everyone
    mesh = _Process.joined.mesh if _Process.joined is not None else None
    if (
        mesh is not None
        and mesh.survivors
        and len(mesh.survivors.living) < mesh.coordinates.replicas
    ):
        raise RemoteError(
            "A replica was lost in an earlier run of this script, and the others went on. Its "
            "processes would be missing in another run: start the script anew, with ckpt_path."
        )
    if known is not None and not _Process.failed and known.world.size() == size:
        return replace(known, coordinates=coordinates)
    _leave_mesh()
    if known is not None:
        known.world.drop()
    base = store_of_all(meeting, coordinates.rank, size)
    _Process.generation += 1
    store = dist.PrefixStore(f"hybrid{_Process.generation}", base)
    _Process.everyone = Everyone(coordinates, store, GroupHandle())
    return _Process.everyone


def store_of_all(meeting: Meeting, rank: int, size: int) -> dist.Store:
    """Return the store that this process uses in all its runs; the first call makes it.

    The first call hosts the store or connects to it, which all ranks do together, and registers
    functions that close all groups when the process ends.

    Args:
        meeting: where the ranks meet.
        rank: global rank of this process.
        size: number of all processes.
    """
    if _Process.store is None:
        atexit.register(_end)
        # exit functions run in reverse order: the sleep comes before the groups are closed
        atexit.register(time.sleep, LETTING_GO_S)
        met = dist.is_initialized()
        _Process.store = _store_beside(size, meeting) if met else make_store(meeting)
        if meeting.outlives:
            _Process.store = of_this_start(_Process.store, rank, size, MEETING_TIMEOUT)
    return _Process.store


def meet_all(everyone: Everyone) -> None:
    """Make the group of all ranks (collective: all ranks call this together).

    Args:
        everyone: what :func:`reach` has returned; its ``world`` gets the group.

    Raises:
        RemoteError: a rank has ended by the failure of an earlier run.
    """
    here = everyone.coordinates
    size = here.replicas * here.ranks_per_replica
    if _Process.failed:
        _wait_for_all(everyone.store, here.rank, size)
    everyone.world.replace(make_world(everyone.store, here.rank, size))
    have_met()
    _Process.failed = False


def _wait_for_all(store: dist.Store, rank: int, size: int) -> None:
    """After a failed run, wait until all ranks are here for the next one (collective).

    Notices ranks that the failure has ended; to make a group would wait for them in vain.

    Args:
        store: store that all ranks share.
        rank: global rank of this process.
        size: number of all ranks.

    Raises:
        RemoteError: a rank that this process has started has ended.
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
    """Join the mesh of replicas and stages (collective: all ranks call this together).

    The mesh of the last run is used again if it was made with the same arguments. Else it is
    closed, and a new one is made.

    Args:
        everyone: what this rank has of the meeting of all ranks.
        coordinates: coordinates of this rank.
        backend: the option ``process_group_backend``, for tensors between stages and replicas.
        timeout: time-out of the mesh's groups.
        device: device of this rank.
        survey: surveys the devices of all ranks; their order in the mesh is then that of the
            survey. ``None``: no survey, and the order of ``coordinates``.
        capacity: relative speeds that the user has given, which the survey uses; ``None``: they are
            measured. Here they only tell whether the mesh of the last run may be used again.
    """
    key = (coordinates, backend, timeout, device, survey is None, capacity)
    if _Process.joined is not None and _Process.key == key:
        return _Process.joined
    _leave_mesh()
    cluster = None if survey is None else survey(everyone.world)
    if cluster is not None:
        coordinates = replace(coordinates, order=cluster.order)
    _Process.generation += 1
    name = f"mesh{_Process.generation}"
    mesh = Mesh(coordinates, everyone.store, everyone.world, backend, timeout, name, device)
    _Process.joined = Joined(mesh, cluster)
    _Process.key = key
    return _Process.joined


def _leave_mesh() -> None:
    """Close the mesh of the last run, and torch's default process group, if there are any."""
    if _Process.joined is not None:
        _Process.joined.mesh.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()
        _Process.joined = None
        _Process.key = ()


def _end() -> None:
    """Close the mesh and all groups; called at the exit of the process.

    Otherwise NCCL would print warnings.
    """
    _leave_mesh()
    everyone, _Process.everyone = _Process.everyone, None
    if everyone is not None and _Process.failed:  # others may never come to what this rank began
        everyone.world.keep()
    elif everyone is not None:
        everyone.world.close()


def forget() -> None:
    """Give up the mesh after a failure, since its links may hold half-sent messages.

    Closes its groups, which wakes ranks that wait in them, and waits for that for at most two
    seconds. The next run makes all groups anew.
    """
    _Process.failed = True
    if _Process.joined is not None and _Process.key:
        _Process.key = ()
        _Process.joined.mesh.leave()
