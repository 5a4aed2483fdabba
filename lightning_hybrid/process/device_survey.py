"""Survey of the machine: all ranks measure devices and links together and exchange the results.

Rank 0 keeps the results as long as it lives, and gives them to the others: a script that trains
several times plans each time with the same numbers, and so do ranks that are started later.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from time import perf_counter

import torch
from torch import Tensor

from lightning_hybrid.comm import (
    UNKNOWN_PEER,
    Coordinates,
    Group,
    broadcast_object,
    gather_objects,
    meet,
    start,
    wait,
)
from lightning_hybrid.planning import (
    Cluster,
    Device,
    Machine,
    Rates,
    average_equal_devices,
    equal_devices_differ,
    given_speeds,
)
from lightning_hybrid.profiling import describe_device, measure_speed, update_s_per_byte

LINK_BYTES = 4 * 2**20
"""Bytes of the messages that measure a link."""
LINK_REPEATS = 4
_MESSAGE_S = {"gloo": 2e-4, "nccl": 5e-5}
"""By backend, seconds that Python takes for a message between two stages, both ranks together."""
_UNMEASURED = {"nccl": (2e10, 1e10, 1e-4)}
"""Assumed by backend, where links are not measured: bytes/s of a link and of an all-reduce, and
seconds of an empty all-reduce."""


def devices_of_all(
    world: Group, device: torch.device, given: Sequence[float] | None
) -> list[Device]:
    """Describe the devices of all ranks (collective: all ranks call this together).

    Args:
        world: group of all ranks.
        device: device of this rank.
        given: the user's relative speeds, by global rank, so that none is measured; ``None``: the
            speeds are measured.

    Returns:
        The devices by global rank; the list is equal on all ranks.
    """
    if given is not None:
        return gather_objects(world, describe_device(device))
    meet(world)  # measure at the same time: ranks on one host slow each other down
    devices = gather_objects(world, describe_device(device, measure_speed(device)))
    if not equal_devices_differ(devices):
        return devices
    meet(world)
    return average_equal_devices(
        gather_objects(world, describe_device(device, measure_speed(device, long=True)))
    )


_SEEN: dict[tuple[object, ...], Machine] = {}
"""Results of :func:`look_around` by its arguments, on rank 0; elsewhere nobody reads them."""


def look_around(
    world: Group, device: torch.device, backend: str, given: tuple[float, ...] | None
) -> Machine:
    """Measure the devices and links of all ranks (collective: all ranks call this together).

    Where rank 0 has called it with the same arguments before, with as many ranks, nothing is
    measured, and all ranks get the first result.

    Args:
        world: gloo group of all ranks.
        device: device of this rank.
        backend: backend of tensors between ranks, ``"gloo"`` or ``"nccl"``.
        given: the user's relative speeds of the devices, by global rank; ``None``: they are
            measured.

    Returns:
        The devices by global rank, and the speeds of links; equal on all ranks.
    """
    key = world.size(), device, backend, given
    # (by rank 0 alone, since the others may have been started later, or have missed a run)
    seen: Machine | None = broadcast_object(world, _SEEN.get(key))
    _SEEN[key] = machine = seen or _look_around(world, device, backend, given)
    return machine


def cluster_of(
    world: Group, machine: Machine, here: Coordinates, drivers: tuple[int, ...] = ()
) -> Cluster:
    """Choose the order of the ranks in the mesh, by their devices (collective over all ranks).

    Args:
        world: group of all ranks.
        machine: the surveyed devices.
        here: coordinates of this rank, for the numbers of replicas and stages. If they have an
            ``order``, which is that of the user's plan, it is kept.
        drivers: global ranks that must be drivers; empty: any rank may be a driver. The value of
            rank 0 counts on all ranks.

    Returns:
        The devices of all ranks with the order in the mesh, equal on all ranks.
    """
    # (of the ranks that it has started, rank 0 alone knows which are servers)
    drivers = broadcast_object(world, drivers, 0)
    cluster = machine.cluster(here.replicas, here.ranks_per_replica, drivers)
    return replace(cluster, order=here.order or cluster.order)


def _look_around(
    world: Group, device: torch.device, backend: str, given: tuple[float, ...] | None
) -> Machine:
    devices = devices_of_all(world, device, given)
    known = _UNMEASURED.get(backend)
    return Machine(
        devices=tuple(devices),
        capacity=None if given is None else given_speeds(given, len(devices)),
        bandwidth_bytes_per_s=known[0] if known else _steady(_link(world, device)),
        rates=_rates(world, device, backend),
    )


def _rates(world: Group, device: torch.device, backend: str) -> Rates:
    """Measure what messages, all-reduces and updates of weights cost (collective over all ranks).

    The result is equal on all ranks.
    """
    known = _UNMEASURED.get(backend)
    bandwidth, reduce_s = known[1:] if known else _reduction(world, device)
    reduce_s = _steady(reduce_s)
    slowest_s: float = max(gather_objects(world, update_s_per_byte(device)))
    return Rates(
        message_s=_MESSAGE_S[backend] + reduce_s,
        reduce_bytes_per_s=_steady(bandwidth),
        reduce_s=reduce_s,
        ranks=world.size(),
        update_s_per_byte=_steady(slowest_s),
        overlaps=device.type != "cpu",
    )


def _steady(value: float) -> float:
    """Round to the nearest power of 2**(1/4), so that a plan does not change with noise."""
    return float(2.0 ** (round(4 * log2(value)) / 4))


def _link(world: Group, device: torch.device) -> float:
    """Measure the bytes/s of the slowest link in a ring of all ranks (collective over all ranks).

    All links of the ring carry a message at the same time.
    """
    size, rank = world.size(), world.rank()
    load = torch.zeros(LINK_BYTES // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(load)

    def pass_on() -> None:
        arrives = start(world.recv, [other], (rank - 1) % size, 0, peer=UNKNOWN_PEER)
        leaves = start(world.send, [load], (rank + 1) % size, 0, peer=UNKNOWN_PEER)
        wait(arrives, UNKNOWN_PEER)
        wait(leaves, UNKNOWN_PEER)

    slowest_s: float = max(gather_objects(world, _best_s(world, pass_on)))
    return LINK_BYTES / slowest_s


def _reduction(world: Group, device: torch.device) -> tuple[float, float]:
    """Measure the all-reduce over all ranks (collective over all ranks).

    Returns:
        A pair: the bytes/s of an all-reduce, and the seconds of an all-reduce of a single number;
        equal on all ranks.
    """
    load = torch.zeros(LINK_BYTES // 4, dtype=torch.float32, device=device)

    def reduce(tensor: Tensor) -> None:
        wait(start(world.allreduce, [tensor], peer=UNKNOWN_PEER), UNKNOWN_PEER)

    empty_s = _best_s(world, lambda: reduce(load[:1]))
    whole_s = _best_s(world, lambda: reduce(load))
    whole_s, empty_s = map(max, zip(*gather_objects(world, (whole_s, empty_s))))
    return LINK_BYTES / max(whole_s - empty_s, 1e-9), empty_s


def _best_s(world: Group, action: Callable[[], None]) -> float:
    """Time an action several times and return the shortest seconds (collective over all ranks).

    The shortest, since other work on a machine can only make a measurement longer. All ranks wait
    for each other before each repetition. Each rank returns its own time.

    Args:
        world: group of all ranks.
        action: what to time; called on all ranks at the same time.
    """
    best_s = float("inf")
    for _ in range(1 + LINK_REPEATS):
        meet(world)
        start_s = perf_counter()
        action()
        best_s = min(best_s, perf_counter() - start_s)
    return best_s
