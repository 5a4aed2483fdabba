"""The devices of a run: their speeds and memory, and the coordinates that ranks get by them."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.errors import PlanError

TOLERANCE = {"cpu": 0.2, "cuda": 0.05}
"""Speeds that differ by less than this fraction count as equal. A CPU is shared with other work of
the machine, with which a plan should not change; a GPU is not shared."""
CONFIRMED = 0.3
"""Equal devices (see `want_second_look`) are taken to differ in speed only if a long measurement
differs by this fraction too."""
GRID = 0.05
"""Speeds are rounded to multiples of this, so that a plan does not change with other work."""
WORTHWHILE = 1.05
"""Ranks are reordered only if the devices together then compute faster by this factor."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Description of the device of one rank.

    Attributes:
        host: name of the machine; ranks of one host share its memory.
        name: ``cpu``, or the model of a GPU.
        memory_bytes: free memory; on a CPU that of the whole host. None: not known.
        memory_limits: name and bytes left of each limit on the process's memory; ranks of one host
            share limits of the same name.
        cores: numbers of the host's cores that the process may run on; empty on an accelerator.
        threads: number of threads that compute; 0 on an accelerator.
        units_per_s: units of benchmark work per second of wall-clock time; 0: not measured.
        units_per_own_s: units per second of the clock of the profile, which on a CPU stops while
            other processes have the processor.
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
    """Costs of messages, all-reduces and optimizer steps, measured before there is a plan.

    Attributes:
        message_s: seconds that a message between two stages adds, with the work around it.
        reduce_bytes_per_s: bytes of the tensor per second, of an all-reduce over all ranks.
        reduce_s: seconds of an all-reduce of an empty tensor.
        ranks: number of ranks in the measured all-reduces.
        update_s_per_byte: seconds of the optimizer step per byte of trained parameters.
        overlaps: whether an all-reduce does not slow down a backward at the same time: on an
            accelerator it does not, on a CPU it takes processor time.
    """

    message_s: float
    reduce_bytes_per_s: float
    reduce_s: float
    ranks: int
    update_s_per_byte: float
    overlaps: bool

    def reduced_s(self, size: float, replicas: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes over some replicas."""
        if replicas == 1:
            return 0.0
        # a ring of R ranks sends 2 (R - 1) / R of the bytes, and was measured with another R
        share = (replicas - 1) / replicas * self.ranks / (self.ranks - 1)
        return self.reduce_s + share * size / self.reduce_bytes_per_s

    def after_backward(
        self, gradient_bytes: Sequence[float], replicas: int
    ) -> tuple[list[float], list[float]]:
        """Seconds of all-reduce and optimizer step for each of n partitions.

        Args:
            gradient_bytes: (n,) bytes of the gradients of each partition.
            replicas: number of replicas.

        Returns:
            (n,) seconds of the all-reduces, and (n,) of the optimizer steps. If all-reduces do not
            overlap, the first is empty and the second has both.
        """
        # the constant part of an all-reduce is counted once, with the last partition
        start_s = self.reduced_s(0.0, replicas)
        reduced = [self.reduced_s(size, replicas) - start_s for size in gradient_bytes]
        reduced[-1] += start_s
        updates = [self.update_s_per_byte * size for size in gradient_bytes]
        if self.overlaps:
            return reduced, updates
        return [], [update + reduce for update, reduce in zip(updates, reduced)]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices of all ranks, and the coordinates that the ranks get.

    Index ``r * stages + k`` in the mesh is ``pp_rank`` k of replica r: 0 is the driver, with the
    last stage, and k has stage k - 1. Rank 0 always has index 0.

    Attributes:
        replicas: number of replicas.
        stages: number of ranks of a replica.
        speeds: speed of each rank's device; 1 is that of rank 0, which is profiled, undisturbed.
        memory_bytes: by rank, the bytes that it may use; None: not known.
        order: for each index in the mesh, its rank.
        bandwidth_bytes_per_s: bandwidth of the slowest link between neighbouring stages; None: not
            measured.
        rates: costs of a step beside computing; None: not known, and left out of predictions.
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
        """For each ``pp_rank`` the speed of its slowest replica, since the others wait for it."""
        return tuple(min(self.speeds[rank] for rank in ranks) for ranks in self._by_pp_rank())

    @property
    def replica_speeds(self) -> tuple[float, ...]:
        """Speed of each replica, relative to one made of the slowest device of every stage.

        All replicas have the same stages, so that the speed of one is the least ratio, over its
        stages, of its device's speed to that of the slowest device of the stage.
        """
        chains = zip(*[iter(self.order)] * self.stages)
        slowest = self.capacities
        return tuple(
            min(self.speeds[rank] / slow for rank, slow in zip(chain, slowest)) for chain in chains
        )

    @property
    def memory_limits(self) -> tuple[int, ...] | None:
        """For each ``pp_rank`` the least memory of its replicas, in bytes; None: not all known."""
        if None in self.memory_bytes:
            return None
        known = [amount or 0 for amount in self.memory_bytes]
        return tuple(min(known[rank] for rank in ranks) for ranks in self._by_pp_rank())

    def with_capacities(self, capacities: Sequence[float]) -> "Cluster":
        """The same devices at other speeds.

        Args:
            capacities: by ``pp_rank``, alike in all replicas.
        """
        by_rank = dict(zip(self.order, [*capacities] * self.replicas))
        return replace(self, speeds=tuple(by_rank[rank] for rank in sorted(by_rank)))

    def _by_pp_rank(self) -> list[tuple[int, ...]]:
        return [self.order[pp_rank :: self.stages] for pp_rank in range(self.stages)]


def make_cluster(
    devices: Sequence[Device],
    replicas: int,
    stages: int,
    given: Sequence[float] | None,
    drivers: Sequence[int] = (),
) -> Cluster:
    """Give the ranks their coordinates, by the speeds of their devices.

    Args:
        devices: devices of all ranks.
        replicas: number of replicas.
        stages: number of ranks of a replica.
        given: relative speeds of the ranks, from the user; None: as measured.
        drivers: see :func:`order_ranks`.

    Raises:
        PlanError: the given speeds are of another number, or not all finite and positive.
    """
    speeds = measured_speeds(devices) if given is None else given_speeds(given, len(devices))
    return Cluster(
        replicas=replicas,
        stages=stages,
        speeds=speeds,
        memory_bytes=tuple(
            memory_of_rank(device, devices, communicators(replicas, stages)) for device in devices
        ),
        order=order_ranks(speeds, replicas, stages, drivers),
    )


COMMUNICATOR_BYTES = 100 * 2**20
"""GPU memory of an NCCL communicator, as users report. It is taken off the free memory of devices,
which is measured before communicators are made."""


def communicators(replicas: int, stages: int) -> int:
    """Number of NCCL communicators of a rank: two for each of its two edges, two over replicas."""
    return (4 if stages > 1 else 0) + (2 if replicas > 1 else 0)


def memory_of_rank(device: Device, devices: Sequence[Device], communicators: int = 0) -> int | None:
    """Bytes that a rank may use: its share of the memory that ranks of its host share.

    Args:
        device: device of the rank.
        devices: devices of all ranks.
        communicators: number of NCCL communicators that the rank will have.
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
    """Check speeds that the user gave, and divide them by that of rank 0, which is profiled.

    Raises:
        PlanError: their number is not that of the devices, or one is not finite and positive.
    """
    if len(values) != count:
        raise PlanError(
            f"Search(capacity=...) has {len(values)} entries {list(values)}, and there are {count} "
            "devices: give one relative speed per device, in the order of the ranks, or 'auto'."
        )
    for rank, value in enumerate(values):
        # True is an int to Python
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise PlanError(
                f"capacity[{rank}]={value!r}, the relative speed of rank {rank}, must be a "
                "finite number of more than 0. (Take a device out by devices=... .)"
            )
    return tuple(value / values[0] for value in values)


def measured_speeds(devices: Sequence[Device]) -> tuple[float, ...]:
    """Speeds relative to rank 0 by the clock of the profile, without measurement noise.

    * Ranks that share too few cores all get their mean speed.
    * Ranks whose speeds are nearly equal (`TOLERANCE`) all get their median.
    * Speeds are rounded to `GRID`.
    """
    # the profile is measured on rank 0, by a clock that stops while other processes run
    own = devices[0].units_per_own_s
    rates = [device.units_per_s / own for device in devices]
    # how they share the cores is up to the scheduler of the system: the mean is what each can have
    for sharers in _crowded(devices):
        mean = statistics.mean(rates[rank] for rank in sharers)
        rates = [mean if rank in sharers else rate for rank, rate in enumerate(rates)]
    speeds = [0.0] * len(rates)
    waiting = sorted(range(len(rates)), key=lambda rank: -rates[rank])
    while waiting:
        first = waiting[0]
        tolerance = TOLERANCE["cpu" if devices[first].threads else "cuda"]
        alike = [rank for rank in waiting if rates[rank] >= rates[first] * (1 - tolerance)]
        # nearly equal devices get one speed, so that a plan does not follow noise
        middle = statistics.median(rates[rank] for rank in alike)
        for rank in alike:
            speeds[rank] = max(1, round(middle / GRID)) * GRID
        waiting = [rank for rank in waiting if rank not in alike]
    return tuple(round(speed, 2) for speed in speeds)


def want_second_look(devices: Sequence[Device]) -> bool:
    """Whether devices must be measured again, for longer, since equal ones differ in speed.

    Devices of one host with the same model, cores and threads should be equally fast. Mostly they
    differ by other work during the measurement; or by a quota of the CPU, of which a short
    measurement meets more or less by chance.
    """
    return not all(
        _alike(twins, TOLERANCE["cpu" if twins[0].threads else "cuda"])
        for twins in _twins(devices).values()
    )


def with_second_look(devices: Sequence[Device]) -> list[Device]:
    """The devices with the speeds of a long measurement; nearly equal ones of a kind get the mean.

    A kind are devices of one host with the same model, cores and threads.
    """
    # devices of a kind that differ in a long measurement too differ indeed, and keep their speeds
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
    """The devices grouped by host, model, cores and threads."""
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
    """Groups of ranks that may run on the same cores of a host and have more threads than cores.

    Their measured speeds depend on how the system's scheduler shares the cores.
    """
    places = [(device.host, device.cores) for device in devices]
    groups = [
        [rank for rank, other in enumerate(places) if other == place]
        for place in dict.fromkeys(places)
        # an accelerator has no cores, and is not shared
        if place[1]
    ]
    return [
        ranks
        for ranks in groups
        if sum(devices[rank].threads for rank in ranks) > len(devices[ranks[0]].cores)
    ]


def order_ranks(
    speeds: Sequence[float], replicas: int, stages: int, drivers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Order the ranks so that the replicas of a stage are on devices of similar speed.

    All replicas have the same cuts and wait for each other in every step, so a stage is as fast as
    its slowest replica. The sum of these minima over the stages is largest when devices are sorted
    by speed and divided into blocks, one for each stage. Rank 0 keeps index 0, which makes its
    block the drivers'. If the gain is small, the ranks keep their order: neighbours in rank are
    often neighbours in the machine.

    Args:
        speeds: by rank, the speed of its device.
        replicas: number of replicas.
        stages: number of ranks of a replica.
        drivers: the ranks that run the script, if others cannot any more.

    Returns:
        For each index in the mesh, its rank.
    """
    as_they_are = tuple(range(replicas * stages))
    fixed = set(drivers)
    ranked = sorted(set(as_they_are) - fixed, key=lambda rank: (-speeds[rank], rank))
    blocks = [sorted(ranked[k : k + replicas]) for k in range(0, len(ranked), replicas)]
    blocks.sort(key=lambda block: block[0])  # rank 0 gets index 0
    blocks = [sorted(fixed), *blocks] if fixed else blocks
    dealt = tuple(rank for replica in zip(*blocks) for rank in replica)
    if fixed and fixed != set(as_they_are[::stages]):
        return dealt
    # neighbours in rank are often neighbours in the machine: keep them for a small gain
    gain = _together(speeds, dealt, stages) / _together(speeds, as_they_are, stages)
    return dealt if gain >= WORTHWHILE else as_they_are


def _together(speeds: Sequence[float], order: Sequence[int], stages: int) -> float:
    return sum(min(speeds[rank] for rank in order[k::stages]) for k in range(stages))
