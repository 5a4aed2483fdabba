"""The devices of a run: how fast each is, how much it holds, and which stage it gets."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.errors import PlanError

TOLERANCE = {"cpu": 0.2, "cuda": 0.05}
"""Speeds that differ by less than this share count as equal. Processors are shared with whatever
else the machine does, and a plan should not change with it; nobody shares a GPU."""
CONFIRMED = 0.3
"""By this share devices that should be equal must differ in a long look as well."""
GRID = 0.05
"""Speeds are rounded to multiples of this, for the same reason."""
WORTHWHILE = 1.05
"""Ranks change places only if the devices then do this much more."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one rank says of its device.

    Attributes:
        host: name of the machine; ranks with the same one share its memory.
        name: ``cpu``, or the model of a GPU.
        memory_bytes: free for this run; on a CPU that of the whole host. None: not known.
        memory_limits: what limits its process, and bytes left; ranks of one host share those of
            the same name.
        cores: numbers of the host's cores that the process may run on; empty on an accelerator.
        threads: number of threads that compute; 0 on an accelerator.
        units_per_s: work done in a second by the wall clock; 0: not measured.
        units_per_own_s: the same by the clock of the profile, which stands still while others have
            the processor.
    """

    host: str
    name: str
    memory_bytes: int | None
    memory_limits: tuple[tuple[str, int], ...] = ()
    cores: tuple[int, ...] = ()
    threads: int = 0
    units_per_s: float = 0.0
    units_per_own_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What was measured of it on all ranks, before there is a plan.

    Attributes:
        message_s: seconds that a message between two stages adds, with the work around it.
        reduce_bytes_per_s: of an all-reduce over all ranks, by the size of the tensor.
        reduce_s: seconds of an all-reduce of nothing.
        ranks: how many took part in it.
        update_s_per_byte: seconds of the optimizer step per byte of the parameters that are
            trained.
        overlaps: whether an all-reduce runs beside the backward at no cost, as on an accelerator;
            on a CPU it takes the processor from it.
    """

    message_s: float
    reduce_bytes_per_s: float
    reduce_s: float
    ranks: int
    update_s_per_byte: float
    overlaps: bool

    def reduced_s(self, size: float, replicas: int) -> float:
        """Seconds of the all-reduce of `size` bytes over some replicas, as a ring of them does."""
        if replicas == 1:
            return 0.0
        # a ring of R ranks sends 2 (R - 1) / R of the bytes, and was measured with another R
        share = (replicas - 1) / replicas * self.ranks / (self.ranks - 1)
        return self.reduce_s + share * size / self.reduce_bytes_per_s

    def after_backward(
        self, gradient_bytes: Sequence[float], replicas: int
    ) -> tuple[list[float], list[float]]:
        """What follows the last backward of each of n partitions.

        Args:
            gradient_bytes: (n,) size of its gradients.
            replicas: number of replicas.

        Returns:
            (n,) seconds of the all-reduce, which are empty where it does not overlap, and (n,) of
            the optimizer step, to which they are then added.
        """
        # an all-reduce of nothing takes its time too: once, with the last partition
        start_s = self.reduced_s(0.0, replicas)
        reduced = [self.reduced_s(size, replicas) - start_s for size in gradient_bytes]
        reduced[-1] += start_s
        updates = [self.update_s_per_byte * size for size in gradient_bytes]
        if self.overlaps:
            return reduced, updates
        return [], [update + reduce for update, reduce in zip(updates, reduced)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices of all ranks, and the coordinates that the ranks take.

    Index ``r * stages + k`` in the mesh is ``pp_rank`` k of replica r: 0 is the driver, with the
    last stage, and k has stage k - 1. Rank 0 always has index 0.

    Attributes:
        replicas: number of replicas.
        stages: number of ranks of a replica.
        speeds: by rank; 1 is the device that is profiled, rank 0's, undisturbed.
        memory_bytes: by rank: what it may take.
        order: for each index in the mesh its rank.
        bandwidth_bytes_per_s: of the slowest link between neighbouring stages; None: not measured.
        rates: what a step takes beside computing; None: not known, and left out of predictions.
    """

    replicas: int
    stages: int
    speeds: tuple[float, ...]
    memory_bytes: tuple[int | None, ...]
    order: tuple[int, ...]
    bandwidth_bytes_per_s: float | None = None
    rates: Rates | None = None

    @property
    def capacities(self) -> tuple[float, ...]:
        """Speed by ``pp_rank``: of the slowest of the replicas, since the others wait for it."""
        return tuple(min(self.speeds[rank] for rank in ranks) for ranks in self._by_pp_rank())

    @property
    def replica_speeds(self) -> tuple[float, ...]:
        """Speed of each replica; 1 is one whose every device is the slowest of its stage.

        All replicas have the same stages, so a replica is as fast as the stage whose device has
        the least to spare.
        """
        chains = zip(*[iter(self.order)] * self.stages)
        slowest = self.capacities
        return tuple(
            min(self.speeds[rank] / slow for rank, slow in zip(chain, slowest)) for chain in chains
        )

    @property
    def memory_limits(self) -> tuple[int, ...] | None:
        """Bytes by ``pp_rank``, of the smallest of the replicas; None: not known of all."""
        if None in self.memory_bytes:
            return None
        known = [amount or 0 for amount in self.memory_bytes]
        return tuple(min(known[rank] for rank in ranks) for ranks in self._by_pp_rank())

    def _by_pp_rank(self) -> list[tuple[int, ...]]:
        return [self.order[pp_rank :: self.stages] for pp_rank in range(self.stages)]


def make_cluster(
    devices: Sequence[Device], replicas: int, stages: int, given: Sequence[float] | None
) -> Cluster:
    """Give the ranks their coordinates.

    Args:
        devices: of all ranks.
        replicas: number of replicas.
        stages: number of stages.
        given: relative speeds of the ranks; None: as measured.

    Raises:
        PlanError: the given speeds are of another number, or not all finite and positive.
    """
    speeds = measured_speeds(devices) if given is None else given_speeds(given, len(devices))
    return Cluster(
        replicas=replicas,
        stages=stages,
        speeds=speeds,
        memory_bytes=tuple(
            memory_of_rank(device, devices, _communicators(replicas, stages)) for device in devices
        ),
        order=order_ranks(speeds, replicas, stages),
    )


COMMUNICATOR_BYTES = 100 * 2**20
"""What a communicator of NCCL takes of a GPU, as its users report. There are none yet where devices
are asked for their free memory."""


def _communicators(replicas: int, stages: int) -> int:
    """How many a rank has: two for each of its two edges, two with the other replicas."""
    return (4 if stages > 1 else 0) + (2 if replicas > 1 else 0)


def memory_of_rank(device: Device, devices: Sequence[Device], communicators: int = 0) -> int | None:
    """Bytes that a rank may take: its share of what ranks of its host have in common.

    Args:
        device: of the rank.
        devices: of all ranks, and so of those of its host.
        communicators: how many the rank will have.
    """
    # an accelerator belongs to one rank; the memory of a host is shared by its ranks
    if not device.threads:
        taken = communicators * COMMUNICATOR_BYTES
        return None if device.memory_bytes is None else max(0, device.memory_bytes - taken)
    beside = [other for other in devices if other.host == device.host]
    shares = []
    if device.memory_bytes is not None:
        shares.append(device.memory_bytes // len(beside))
    for name, left in device.memory_limits:
        sharers = sum(name in dict(other.memory_limits) for other in beside)
        shares.append(left // sharers)
    return min(shares, default=None)


def given_speeds(values: Sequence[float], count: int) -> tuple[float, ...]:
    """Check speeds that the user gave; relative to the first rank's, whose device is profiled.

    Raises:
        PlanError: they are of another number than the devices, or not all finite and positive.
    """
    if len(values) != count:
        raise PlanError(
            f"device_capacity has {len(values)} entries {list(values)}, and there are {count} "
            "devices: give one relative speed per device, in the order of the ranks, or 'auto'."
        )
    for rank, value in enumerate(values):
        # True is an int to Python
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise PlanError(
                f"device_capacity[{rank}]={value!r}, the relative speed of rank {rank}, must be a "
                "finite number of more than 0. (Take a device out by devices=... .)"
            )
    return tuple(value / values[0] for value in values)


def measured_speeds(devices: Sequence[Device]) -> tuple[float, ...]:
    """Speeds relative to the profile's clock on rank 0, rid of what is only noise.

    * Ranks that have to share too few cores share their speed.
    * Speeds that are nearly those of the fastest so far are one class and share their median.
    * What is left is rounded.
    """
    # the profile is taken on rank 0, by the clock that stands still for others' work
    own = devices[0].units_per_own_s
    rates = [device.units_per_s / own for device in devices]
    # who gets a shared core is the scheduler's choice: the mean is what all of them have
    for sharers in _crowded(devices):
        mean = statistics.mean(rates[rank] for rank in sharers)
        rates = [mean if rank in sharers else rate for rank, rate in enumerate(rates)]
    speeds = [0.0] * len(rates)
    waiting = sorted(range(len(rates)), key=lambda rank: -rates[rank])
    while waiting:
        first = waiting[0]
        tolerance = TOLERANCE["cpu" if devices[first].threads else "cuda"]
        alike = [rank for rank in waiting if rates[rank] >= rates[first] * (1 - tolerance)]
        # a class of nearly equal devices is one speed, so that a plan does not follow noise
        middle = statistics.median(rates[rank] for rank in alike)
        for rank in alike:
            speeds[rank] = max(1, round(middle / GRID)) * GRID
        waiting = [rank for rank in waiting if rank not in alike]
    return tuple(round(speed, 2) for speed in speeds)


def want_second_look(devices: Sequence[Device]) -> bool:
    """Whether a short look was not enough to tell how fast devices are.

    Twins, of one host with the same model, cores and threads, should be equal. What makes them
    differ is mostly other work that came and went while they were measured; or a quota, and then it
    is chance how much of it a short look has met.
    """
    return not all(
        _alike(twins, TOLERANCE["cpu" if twins[0].threads else "cuda"])
        for twins in _twins(devices).values()
    )


def with_second_look(devices: Sequence[Device]) -> list[Device]:
    """What a long look says: twins that are close to equal then have their mean speed."""
    # what differs in a long look as well is slower indeed, and keeps its own number
    means = {
        kind: statistics.mean(device.units_per_s for device in twins)
        for kind, twins in _twins(devices).items()
        if _alike(twins, CONFIRMED)
    }
    return [
        replace(device, units_per_s=means.get(_kind(device), device.units_per_s))
        for device in devices
    ]


def _twins(devices: Sequence[Device]) -> dict[object, list[Device]]:
    """The devices by kind."""
    kinds: dict[object, list[Device]] = {}
    for device in devices:
        kinds.setdefault(_kind(device), []).append(device)
    return kinds


def _kind(device: Device) -> object:
    return device.host, device.name, device.cores, device.threads


def _alike(devices: Sequence[Device], tolerance: float) -> bool:
    rates = [device.units_per_s for device in devices]
    return min(rates) >= max(rates) * (1 - tolerance)


def _crowded(devices: Sequence[Device]) -> list[list[int]]:
    """Ranks that may run on the same cores of a host, which are fewer than their threads.

    Who has a core at a moment is then the scheduler's choice, and would be measured.
    """
    places = [(device.host, device.cores) for device in devices]
    groups = [
        [rank for rank, other in enumerate(places) if other == place]
        for place in dict.fromkeys(places)
        # an accelerator has no cores, and nobody shares it
        if place[1]
    ]
    return [
        ranks
        for ranks in groups
        if sum(devices[rank].threads for rank in ranks) > len(devices[ranks[0]].cores)
    ]


def order_ranks(speeds: Sequence[float], replicas: int, stages: int) -> tuple[int, ...]:
    """For each index in the mesh its rank: replicas of a stage on devices as equal as can be.

    All replicas have the same cuts and wait for each other in every step, so a stage is as fast as
    its slowest replica. What the devices then do together, the sum of those minima over the stages,
    is largest when they are sorted by speed and dealt out block by block: one block, one stage.
    Rank 0 keeps index 0, which makes its block the drivers'. If the gain is small, all stay where
    they are: neighbours in rank are often neighbours in the machine.
    """
    as_they_are = tuple(range(replicas * stages))
    ranked = sorted(as_they_are, key=lambda rank: (-speeds[rank], rank))
    blocks = [sorted(ranked[k * replicas : (k + 1) * replicas]) for k in range(stages)]
    blocks.sort(key=lambda block: block[0])  # rank 0 has index 0
    dealt = tuple(rank for replica in zip(*blocks) for rank in replica)
    # neighbours in rank are often neighbours in the machine: do not part them for little
    gain = _together(speeds, dealt, stages) / _together(speeds, as_they_are, stages)
    return dealt if gain >= WORTHWHILE else as_they_are


def _together(speeds: Sequence[float], order: Sequence[int], stages: int) -> float:
    return sum(min(speeds[rank] for rank in order[k::stages]) for k in range(stages))
