"""The devices of a run: their speeds, their memory, and which replica and stage each rank gets."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.errors import PlanError

TOLERANCE = {"cpu": 0.2, "cuda": 0.05}
"""By type of device, the relative difference up to which measured speeds count as equal. It is
larger for CPUs: other processes use them too, and must not change a plan."""
CONFIRMED = 0.3
"""Relative difference of speed up to which devices of one kind (see `equal_devices_differ`) count
as equal after a long measurement."""
GRID = 0.05
"""Measured relative speeds are rounded to multiples of this, so that small disturbances by other
processes do not change a plan."""
WORTH_REORDERING = 1.05
"""`order_ranks` changes the order of the ranks only if the sum of the stages' speeds grows by this
factor at least."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Description of the device of one rank.

    Attributes:
        host: name of the machine; ranks of one host share its memory.
        name: ``cpu``, or the model of a GPU.
        memory_bytes: bytes of free memory: of the GPU, or on a CPU of the whole host. None: not
            known.
        memory_limits: name and bytes left of each limit on the memory of the rank's process. If
            ranks of one host have limits of the same name, they share that limit.
        cores: numbers of the host's cores that the process may run on; empty on an accelerator.
        threads: number of threads that compute; 0 on an accelerator.
        units_per_s: units of benchmark work per second of wall-clock time; 0: not measured.
        units_per_own_s: units of benchmark work per second of the clock that profiles a network; on
            a CPU with one thread this clock stops while other processes have the processor. 0: not
            measured.
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
        message_s: seconds that a message between two stages takes beside its transfer (latency, and
            the work of Python for it).
        reduce_bytes_per_s: bytes of a tensor that an all-reduce over all ranks sums up per second.
        reduce_s: seconds of an all-reduce of an empty tensor.
        ranks: number of ranks in the measured all-reduces.
        update_s_per_byte: seconds of the optimizer step per byte of trained parameters.
        overlaps: whether all-reduces and backwards overlap without slowing each other down: True on
            an accelerator, False on a CPU, where an all-reduce takes processor time.
    """

    message_s: float
    reduce_bytes_per_s: float
    reduce_s: float
    ranks: int
    update_s_per_byte: float
    overlaps: bool

    def reduced_s(self, size: float, replicas: int) -> float:
        """Predict the seconds of a ring all-reduce.

        Args:
            size: bytes of the tensor.
            replicas: number of ranks that take part; with 1 the result is 0.
        """
        if replicas == 1:
            return 0.0
        # a ring of R ranks sends 2 (R - 1) / R of the bytes, and was measured with another R
        share = (replicas - 1) / replicas * self.ranks / (self.ranks - 1)
        return self.reduce_s + share * size / self.reduce_bytes_per_s

    def after_backward(
        self, gradient_bytes: Sequence[float], replicas: int
    ) -> tuple[list[float], list[float]]:
        """Predict the seconds of all-reduce and optimizer step for each of n partitions.

        Args:
            gradient_bytes: (n,) bytes of the gradients of each partition, in the order of the
                network.
            replicas: number of ranks over which gradients are averaged.

        Returns:
            (n,) seconds of the all-reduces, and (n,) seconds of the optimizer steps. If `overlaps`
            is False, the first list is empty and the second has the sums of both.
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
    """The devices of all ranks, and the replica and stage that each rank gets.

    Index ``r * stages + k`` in the mesh stands for ``pp_rank`` k of replica r. ``pp_rank`` 0 is the
    driver, which runs the user's script and has the last stage; ``pp_rank`` k > 0 has stage k - 1.
    Rank 0 always has index 0.

    Attributes:
        replicas: number of replicas.
        stages: number of ranks of a replica.
        speeds: by rank, the relative speed of its device; 1 is the device of rank 0, on which
            networks are profiled, undisturbed by other processes.
        memory_bytes: by rank, the bytes that it may use; None: not known.
        order: by index in the mesh, the rank.
        bandwidth_bytes_per_s: bandwidth of the slowest link between neighbouring stages; None: not
            measured.
        rates: costs of messages, all-reduces and optimizer steps; None: not known, and left out of
            predictions.
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
        """By ``pp_rank``, the speed of its slowest device in all replicas; others wait for it."""
        return tuple(min(self.speeds[rank] for rank in ranks) for ranks in self._by_pp_rank())

    @property
    def replica_speeds(self) -> tuple[float, ...]:
        """Speed of each replica, relative to one made of the slowest device of every stage.

        All replicas have the same stages. Therefore the speed of a replica is the least, over its
        stages, of the ratio of its device's speed to the speed of that stage's slowest device in
        any replica.
        """
        chains = zip(*[iter(self.order)] * self.stages)
        slowest = self.capacities
        return tuple(
            min(self.speeds[rank] / slow for rank, slow in zip(chain, slowest)) for chain in chains
        )

    @property
    def memory_limits(self) -> tuple[int, ...] | None:
        """By ``pp_rank``, the least bytes that one of its ranks may use; None: not known."""
        if None in self.memory_bytes:
            return None
        known = [amount or 0 for amount in self.memory_bytes]
        return tuple(min(known[rank] for rank in ranks) for ranks in self._by_pp_rank())

    def with_capacities(self, capacities: Sequence[float]) -> "Cluster":
        """Make a copy of this cluster whose devices have other speeds.

        Args:
            capacities: by ``pp_rank``, the relative speed of its devices, the same in all replicas.
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
    """Make the `Cluster` of a run: give each rank its replica and stage by the speed of its device.

    Args:
        devices: device of each rank, in the order of the ranks.
        replicas: number of replicas.
        stages: number of ranks of a replica.
        given: relative speed of each rank, from the user; None: use the measured speeds.
        drivers: the ranks that must be drivers (run the script): one for each replica, rank 0 among
            them. Empty: the speeds decide.

    Raises:
        PlanError: the number of given speeds is not that of the devices, or a given speed is not a
            finite number of more than 0.
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
"""GPU memory that one NCCL communicator takes, as users report. It is subtracted from the free
memory of GPUs, which is measured before communicators are made."""


def communicators(replicas: int, stages: int) -> int:
    """Number of NCCL communicators that a rank makes.

    They are two for each link to a neighbouring stage (the ring of stages gives a rank two links),
    and two for averages over the replicas.

    Args:
        replicas: number of replicas.
        stages: number of devices of a replica.
    """
    return (4 if stages > 1 else 0) + (2 if replicas > 1 else 0)


def memory_of_rank(device: Device, devices: Sequence[Device], communicators: int = 0) -> int | None:
    """Bytes of memory that a rank may use; None: not known.

    A GPU belongs to one rank: the result is its free memory less that of communicators. On CPUs the
    free memory of the host, and each limit on the processes, is divided equally by the ranks that
    share it; the least of these shares counts.

    Args:
        device: device of the rank.
        devices: devices of all ranks, this one included.
        communicators: number of NCCL communicators that the rank will make.
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
    """Check the speeds that the user gave, and divide them by the speed of rank 0.

    Args:
        values: relative speed of each rank's device, in the order of the ranks.
        count: number of devices.

    Returns:
        The speeds, in the same order; 1.0 for rank 0, on which networks are profiled.

    Raises:
        PlanError: there are not `count` values, or a value is not a finite number of more than 0.
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
    """Compute the relative speed of each rank's device from what was measured, without the noise.

    1.0 is what rank 0 does per second of its own processor time, in which the profile is measured
    (so rank 0 is below 1.0 where other processes take its cores).

    * Ranks that run on the same cores, and have more threads than cores, all get their mean speed.
    * Ranks whose speeds are nearly equal (`TOLERANCE`) all get their median speed.
    * Speeds are rounded to multiples of `GRID`.

    Args:
        devices: devices of all ranks, in the order of the ranks, with measured speeds.

    Returns:
        One speed for each device, in the same order; a multiple of `GRID`, and at least `GRID`.
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


def equal_devices_differ(devices: Sequence[Device]) -> bool:
    """Whether devices of one kind differ in measured speed, so that a longer measurement is needed.

    Devices are of one kind if they have the same host, model, cores and threads; they should be
    equally fast. If they differ by more than `TOLERANCE`, mostly other work has disturbed the short
    measurement, or a CPU quota has stopped some processes in it and others not.

    Args:
        devices: devices of all ranks, with the speeds of a short measurement.
    """
    return not all(
        _alike(twins, TOLERANCE["cpu" if twins[0].threads else "cuda"])
        for twins in _twins(devices).values()
    )


def average_equal_devices(devices: Sequence[Device]) -> list[Device]:
    """Give devices of one kind their mean speed, unless a long measurement shows that they differ.

    Devices are of one kind if they have the same host, model, cores and threads. If the speeds of a
    kind differ by more than `CONFIRMED`, its devices keep the speeds that were measured.

    Args:
        devices: devices of all ranks, with the speeds of a long measurement.

    Returns:
        The devices in the same order, with corrected `units_per_s`.
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
    """Group the devices by kind: by host, model, cores and threads."""
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
    """Find groups of ranks that run on the same cores of a host and have more threads than cores.

    The system's scheduler decides how such ranks share the cores, so their single speeds say
    little.

    Returns:
        The ranks of each group.
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
    """Order the ranks so that each stage has devices of similar speed in all replicas.

    All replicas have the same cuts and wait for each other in every step, so a stage is as fast as
    its slowest device. The sum of these speeds over the stages is largest if devices are sorted by
    speed and divided into blocks, one for each stage. Rank 0 keeps index 0, so its block is that of
    the drivers. If the sum grows by less than `WORTH_REORDERING`, the ranks keep their order:
    neighbours in rank are often neighbours in the machine.

    Args:
        speeds: by rank, the speed of its device.
        replicas: number of replicas.
        stages: number of ranks of a replica.
        drivers: the ranks that must be drivers (run the script): one for each replica, rank 0 among
            them. Empty: the speeds decide.

    Returns:
        By index in the mesh (``replica * stages + pp_rank``), the rank.
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
    return dealt if gain >= WORTH_REORDERING else as_they_are


def _together(speeds: Sequence[float], order: Sequence[int], stages: int) -> float:
    return sum(min(speeds[rank] for rank in order[k::stages]) for k in range(stages))
