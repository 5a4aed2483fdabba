"""Refuse networks that do not fit into memory: say what is missing where, and what would fit.

Throughout, m is the number of devices of a replica, and a *chain* has one stage on each of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_hybrid.allocation import SLACK
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.partition_table import PartitionTable

_STEPS = 60
"""Number of bisections, after which the missing memory is known to a byte."""
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class ChainSizes:
    """How a network is spread over the devices of a replica, as a chain of stages.

    Attributes:
        stages: number of stages, one for each device.
        microbatches: number of micro-batches of a replica's batch. Without the next two options a
            device holds the activations of all of them at once.
        recompute: whether stages recompute activations in the backward: then a device holds the
            activations of one micro-batch, and the inputs of all.
        inside: whether backwards run inside of the network's calls (schedule `1f1b`): then a device
            holds the activations of at most as many micro-batches as there are stages, and a second
            set of gradients.
    """

    stages: int
    microbatches: int
    recompute: bool = False
    inside: bool = False

    @property
    def alive(self) -> int:
        """Most micro-batches that stage 0 has run forward and not yet backward."""
        # a single stage runs the backward of each micro-batch before the next one's forward
        most = self.stages if self.inside or self.stages == 1 else self.microbatches
        return min(most, self.microbatches)

    def __str__(self) -> str:
        slices = f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        again = " and recompute=True" if self.recompute else ""
        inside = " and schedule='1f1b', if the network returns its loss" if self.inside else ""
        return f"{self.stages} stage{'s' * (self.stages > 1)}, {slices}{again}{inside}"


@dataclass(frozen=True)
class TrainingMemory:
    """Memory that a network takes in training.

    Attributes:
        needed: bytes that each partition holds; empty: not known.
        most: number of micro-batches whose activations a partition holds at once.
        kept_inputs: further bytes that each device holds: inputs of its stages, kept for
            recomputation.
    """

    needed: Sequence[int]
    most: int = 1
    kept_inputs: int = 0

    def room(self, limits: Sequence[int]) -> tuple[int, ...]:
        """Subtract the kept inputs from the limits of the devices.

        Args:
            limits: bytes that each device may use.

        Returns:
            Bytes that each device may use for partitions.
        """
        return tuple(max(0, limit - self.kept_inputs) for limit in limits)


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Compares the memory that a network needs, spread in one way, with the memory of the devices.

    Attributes:
        way: numbers of stages and micro-batches, and options that change the memory.
        limits: (m,) bytes that each device may use, by its index in the replica.
        whole: table of the network for the whole batch of a replica; its activations are taken to
            be proportional to the samples.
        batch: number of samples, which is also the largest number of micro-batches.
        may_recompute: whether the advice in an error may be recomputation.
        may_go_inside: whether the advice may be that backwards run inside of calls.
    """

    way: ChainSizes
    limits: Sequence[float]
    whole: PartitionTable
    batch: int
    may_recompute: bool = True
    may_go_inside: bool = False

    @classmethod
    def of(
        cls,
        table: PartitionTable,
        way: ChainSizes,
        limits: Sequence[float],
        batch: int,
        *,
        may_recompute: bool = True,
        may_go_inside: bool = False,
    ) -> "MemoryFit":
        """Make a `MemoryFit` from a table that is for one micro-batch.

        Args:
            table: table of the network, whose sizes are for a micro-batch of ``way``.
            way: numbers of stages and micro-batches, and options that change the memory.
            limits: (m,) bytes that each device may use, by its index in the replica.
            batch: number of samples of a replica's batch.
            may_recompute: whether the advice in an error may be recomputation.
            may_go_inside: whether the advice may be that backwards run inside of calls.
        """
        whole = table.scaled(way.microbatches)
        return cls(
            way=way,
            limits=limits,
            whole=whole,
            batch=batch,
            may_recompute=may_recompute,
            may_go_inside=may_go_inside,
        )

    @property
    def crossing_bytes(self) -> float:
        """Bytes of the whole batch's activations that cross the widest cut."""
        return max(self.whole.cut_bytes, default=0.0)

    @cached_property
    def lacks(self) -> list[float]:
        """(m,) bytes that each device lacks with the best cuts; negative: bytes that are left.

        The best cuts are those for which the device that lacks most lacks as little as possible.
        """
        return least_lacks(self._held, self._room, self._order)

    @property
    def fits(self) -> bool:
        """Whether there are cuts with which no device lacks memory, but for rounding errors."""
        ceilings = [size * (1 + SLACK) for size in self._room]
        return _filled(self._held, ceilings, self._order) is not None

    @property
    def _held(self) -> PartitionTable:
        """Table for the whole batch whose `memory_bytes` are those held in training under `way`."""
        way, whole = self.way, self.whole
        share = (1 if way.recompute else way.alive) / way.microbatches
        sizes = zip(whole.kept_bytes, whole.activation_bytes)
        held = [kept + share * activation for kept, activation in sizes]
        if way.inside and way.stages > 1:
            aside = whole.gradient_bytes or [0] * len(held)
            held = [size + more for size, more in zip(held, aside)]
        return replace(whole, memory_bytes=held)

    @property
    def _room(self) -> list[float]:
        """(m,) bytes of each device for partitions, less the inputs kept for recomputation."""
        share = self.way.alive / self.way.microbatches if self.way.recompute else 0.0
        kept_inputs = share * self.crossing_bytes
        return [limit - kept_inputs for limit in self.limits]

    @property
    def _order(self) -> list[int]:
        return [*range(1, self.way.stages), 0]

    def on(self, way: ChainSizes, limits: Sequence[float]) -> "MemoryFit":
        """Make the `MemoryFit` of the same network, spread in another way over other devices.

        Args:
            way: numbers of stages and micro-batches, and options that change the memory.
            limits: (m,) bytes that each device may use, by its index in the replica.
        """
        return replace(self, way=way, limits=limits)

    def __str__(self) -> str:
        short = [
            f"device {device} lacks {gigabytes(lack)} (it has {gigabytes(limit)})"
            for device, (lack, limit) in enumerate(zip(self.lacks, self.limits))
            if lack > SLACK * limit
        ]
        more = f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN else ""
        return f"with {self.way}, " + ", ".join(short[:_SHOWN]) + more


def least_lacks(
    table: PartitionTable, limits: Sequence[float], order: Sequence[int]
) -> list[float]:
    """Find how much memory each device lacks, for the chain whose largest lack is least.

    Args:
        table: the partitions, with their memory.
        limits: (m,) bytes of each device, by its index in the replica.
        order: (m,) the device of each stage, by index in the replica.

    Returns:
        (m,) bytes that each device lacks; a negative number is what it has left; infinite if there
        are fewer partitions than stages.
    """
    # with the upper bound as additional memory, each device could hold all partitions
    copies = sum(weight.copy_bytes * len(order) for weight in table.tied)
    low, high = -max(limits), sum(table.memory_bytes) + copies - min(0.0, *limits)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        fits = _filled(table, [limit + middle for limit in limits], order) is not None
        low, high = (low, middle) if fits else (middle, high)
    filled = _filled(table, [limit + high for limit in limits], order)
    if filled is None:  # fewer partitions than stages
        filled = [float("inf")] * len(limits)
    return [taken - limit for taken, limit in zip(filled, limits)]


def _filled(
    table: PartitionTable, limits: Sequence[float], order: Sequence[int]
) -> list[float] | None:
    """Cut a chain by memory alone: each stage in turn takes as many partitions as its device holds.

    Args:
        table: the partitions, with their memory.
        limits: (m,) bytes of each device, by its index in the replica.
        order: (m,) the device of each stage, by index in the replica.

    Returns:
        (m,) bytes on each device; None: some partitions are left over, or a stage gets none.
    """
    taken = [0.0] * len(limits)
    position = 0
    count = len(table.memory_bytes)
    for stage, device in enumerate(order):
        last = count - (len(order) - 1 - stage)  # the later stages need one partition each
        begun = position
        while position < last and table.held(begun, position + 1) <= limits[device]:
            position += 1
        # every stage needs a partition
        if position == begun:
            return None
        taken[device] = table.held(begun, position)
    return taken if position == count else None


def what_lacks(tried: Sequence[MemoryFit]) -> str:
    """Write what devices lack, as text for an error: for each number of stages the nearest try.

    Args:
        tried: ways that were tried and do not fit. The nearest is the way whose fullest device
            lacks least.
    """
    nearest: dict[int, MemoryFit] = {}
    for fit in sorted(tried, key=_worst):
        nearest.setdefault(fit.way.stages, fit)
    return "; ".join(map(str, [*nearest.values()][:_SHOWN]))


def what_would_fit(tried: Sequence[MemoryFit]) -> str:
    """Write with which sizes or devices the network would fit, as text for an error.

    Args:
        tried: ways that were tried and do not fit; they are not advised.
    """
    # start from the try that lacks least
    nearest = min(tried, key=_worst)
    known = {fit.way for fit in tried}
    found = [way for way in _ways(nearest) if way not in known]
    room = gigabytes(min(nearest.limits))
    texts = [
        str(way)
        if way.stages == nearest.way.stages
        else f"{way} (each on a device with {room} free)"
        for way in found
    ]
    stages = nearest.way.stages
    needed = max(nearest.on(nearest.way, [0.0] * stages).lacks)
    devices = f"{stages} devices" if stages > 1 else "a device"
    texts.append(f"{nearest.way}, on {devices} with {gigabytes(needed)} free")
    return f"It would fit with {'; or '.join(texts)}."


def _ways(nearest: MemoryFit) -> Iterator[ChainSizes]:
    """Find ways of spreading the network that fit into memory, for advice.

    Args:
        nearest: the try that lacks least, among those that do not fit.

    Yields:
        Ways with as many stages, but schedule `1f1b` or recomputation; then ways with more stages,
        which would fit on devices with the memory of the smallest one.
    """
    stages, microbatches = nearest.way.stages, nearest.way.microbatches
    room = min(nearest.limits)
    # powers of two divide most batches
    counts = [m for m in (2**k for k in range(1, 7)) if microbatches <= m <= nearest.batch]
    again = [m for m in sorted({*counts, microbatches}) if nearest.may_recompute and m > 1]
    inside = replace(nearest.way, inside=True, recompute=False)
    if stages > 1 and nearest.may_go_inside and nearest.on(inside, nearest.limits).fits:
        yield inside
    if stages > 1:
        same = (replace(nearest.way, microbatches=m, recompute=True) for m in again)
        yield from [way for way in same if nearest.on(way, nearest.limits).fits][:1]
    most = len(nearest.whole.kept_bytes)
    for slices, recompute in [(microbatches, False), *((m, True) for m in again[-1:])]:
        for more in range(stages + 1, most + 1):
            way = replace(nearest.way, stages=more, microbatches=slices, recompute=recompute)
            if nearest.on(way, [room] * more).fits:
                yield way
                most = more - 1  # recomputation is advised only if it saves stages
                break


def _worst(fit: MemoryFit) -> float:
    return max(fit.lacks)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def check_memory(
    table: PartitionTable,
    held: TrainingMemory,
    limits: Sequence[int],
    *,
    recompute: bool = False,
    tried: Sequence[MemoryFit] = (),
    contiguous: bool = False,
) -> None:
    """Raise an error with advice if no placement of a network fits into memory.

    Args:
        table: the network's partitions.
        held: memory that the partitions hold in training, from `held_in_training`.
        limits: bytes that each device of a replica may use, by its index.
        recompute: whether activations are recomputed.
        tried: the current way of spreading the network, then other ways that the advice leaves out;
            empty: no other ways are advised.
        contiguous: whether each device must have one stage: then a chain must fit, the first of
            `tried`.

    Raises:
        PlanError: one partition is larger than any device, or all are larger than all devices
            together, or no chain fits; the text says what is missing where, and what would fit.
    """
    needed, limits = held.needed, held.room(limits)
    again = ", with recompute=True," if recompute else ""
    free = "free beside the inputs that its stages keep" if recompute else "free"
    largest = max(range(len(needed)), key=needed.__getitem__)
    roomiest = max(range(len(limits)), key=limits.__getitem__)
    more = ""
    # the simplest reason first, which names one thing to change
    if needed[largest] > limits[roomiest]:
        problem = (
            f"network partition {table.names[largest]!r} needs{again} "
            f"{_spelled(table, held.most, slice(largest, largest + 1))}, more than any device has: "
            f"the largest, device {roomiest} of a replica, has {gigabytes(limits[roomiest])} {free}"
        )
    elif sum(needed) > sum(limits):
        each = ", ".join(map(gigabytes, limits))
        more = ", or more stages (pipeline_parallel_size)"
        problem = (
            f"the network needs{again} {_spelled(table, held.most)}, more than the "
            f"{len(limits)} devices of a replica have {free} together: {gigabytes(sum(limits))} "
            f"({each})"
        )
    elif contiguous and tried and not tried[0].fits:
        more = ", or more stages (pipeline_parallel_size)"
        problem = f"no chain of stages fits into memory, however it is cut: {tried[0]}"
    else:
        return
    raise PlanError(f"{problem}. {_advice(table, held.most, more, tried)}")


def _advice(table: PartitionTable, held: int, more: str, tried: Sequence[MemoryFit]) -> str:
    texts = [
        "Make the batch smaller (activations grow with it), take an optimizer with less state, or "
        f"use larger devices{more}."
    ]
    if held > 1:
        less = gigabytes(sum(table.held_bytes(1)))
        texts.append(f"recompute=True holds activations of one micro-batch: {less} in all.")
    if tried:
        texts.append(what_would_fit(tried))
    return " ".join(texts)


def _spelled(table: PartitionTable, held: int, which: slice = slice(None)) -> str:
    """Write what some partitions need, in all and by kind of memory.

    Args:
        table: the partitions.
        held: number of micro-batches whose activations are held at once.
        which: the partitions that count.
    """
    kept, *parts, activations = (
        sum(sizes[which])
        for sizes in (
            table.kept_bytes,
            table.parameter_bytes,
            table.gradient_bytes,
            table.bucket_bytes,
            table.activation_bytes,
        )
    )
    parameters, gradients, copies = map(gigabytes, parts)
    buckets = f"{copies} to average them, " if table.bucket_bytes else ""
    return (
        f"{gigabytes(kept + held * activations)} (parameters {parameters}, gradients {gradients}, "
        f"{buckets}optimizer {gigabytes(kept - sum(parts))}, "
        f"activations {gigabytes(activations)} for each of {held} micro-batches held)"
    )
