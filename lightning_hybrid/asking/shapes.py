"""Which shape: every number of replicas, stages, stages per device and micro-batches, by its speed.

A shape uses all devices of a cluster: R replicas of S devices, whose stages are v in a row on each
device (v > 1: a loop, which shortens the bubble and crosses more cuts), and M micro-batches. As in
Lightning, every replica has a batch of its own, so shapes with different R are compared by samples
per second and not by the time of a step.

First all shapes are cut by `balanced`, then the fastest ones with v = 1 by the dynamic programme of
`chains`, where it is quick. The ranks of a replica are neighbours, in the order of the devices.
Where devices are not alike, the replicas may take unequal parts of their R batches together, by
their speed (``balance="speed"``), and the last devices may be left out (``Trainer(devices=...)``).
Where devices or links are not alike, stages of a replica may have copies as well.
Where stages do not fit, a shape is tried once more with stages that run their forward again for the
backward and hold the activations of one micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import truediv

import numpy as np

from lightning_hybrid.asking.balanced import balanced_ends
from lightning_hybrid.asking.cluster_description import ClusterDescription, Level
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import (
    CopiedStages,
    Fit,
    Links,
    PartitionTable,
    Plan,
    StepProblem,
    Way,
    best_chain,
    best_cuts,
    deal,
    gigabytes,
    of_slowest,
    owners_of,
    what_lacks,
    what_would_fit,
)

_MOST_TURNS = 3
"""Stages per device that are tried at most."""
_MOST_MICROBATCHES = 64
"""Micro-batches that are tried at most. More of them hold no less, since all are in flight."""
_REFINED = 5
"""Shapes that the dynamic programme looks at again."""
_MOST_COPIED = 8
"""Devices of a replica whose stages have copies, at most; twice as many micro-batches."""
_QUICK = 400
"""Partitions times devices up to which it takes a moment."""


CostsOf = Callable[[int], PartitionTable]
"""What the partitions cost for a micro-batch of so many samples, on a cluster's first device."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """R replicas of S devices with v stages each, M micro-batches: how fast, does it fit?

    Attributes:
        replicas: R, each with the whole network.
        devices_per_replica: S, devices of a replica.
        stages_per_device: v; 1: each device has one stage.
        microbatches: M, slices of a replica's batch.
        ends: for each stage the number after its last partition.
        devices: for each stage its device within the replica, or those of its copies.
        step_s: predicted seconds of a step.
        samples: number of samples of all replicas in a step.
        bubble: share of the devices' time in which they do not compute.
        search: what found the cuts: `balanced` or `dynamic`; with copies `exact` or `descent`.
        lacking_bytes: what the fullest device lacks; 0: it fits.
        recompute: whether stages run their forward again for the backward.
        shares: samples that each replica takes in a step; empty: all take as many.
        fit: of what does not fit, what lacks if each device has one stage.
        copies: of each stage; empty: each has one.
    """

    replicas: int
    devices_per_replica: int
    stages_per_device: int
    microbatches: int
    ends: tuple[int, ...]
    devices: tuple[int | tuple[int, ...], ...]
    step_s: float
    samples: int
    bubble: float
    search: str
    lacking_bytes: float = 0.0
    recompute: bool = False
    shares: tuple[int, ...] = ()
    fit: Fit | None = None
    copies: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every device can hold its stages."""
        return self.lacking_bytes <= 0

    @property
    def samples_per_s(self) -> float:
        """Throughput of all replicas."""
        return self.samples / self.step_s if self.step_s else float("inf")

    @property
    def stages(self) -> str:
        """Their number, with their copies."""
        copies = f" ({'-'.join(map(str, self.copies))} copies)" if self.copies else ""
        return f"{len(self.copies) or self.devices_per_replica}{copies}"

    @property
    def _taking(self) -> str:
        return f" with {', '.join(map(str, self.shares))} samples" if self.shares else ""

    def __str__(self) -> str:
        loop = f" x {self.stages_per_device} a device" if self.stages_per_device > 1 else ""
        number, _, copies = self.stages.partition(" ")
        return (
            f"{self.replicas} replica{'s' * (self.replicas > 1)}{self._taking} x {number} "
            f"stage{'s' * (self.devices_per_replica > 1)}{copies and f' {copies}'}{loop}, "
            f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
            f"{', activations computed again' * self.recompute}"
        )


def rank_shapes(
    costs_of: CostsOf, cluster: ClusterDescription, batch: int, *, splits: bool = True
) -> list[Shape]:
    """All shapes on the devices of a cluster, the fastest first; then those that do not fit.

    Micro-batches are of equal size, so M divides the batch, and S divides the number of devices;
    M is at most 64.

    Args:
        costs_of: The costs of the network's partitions.
        cluster: The devices. All are used; where they are not alike, also the first ones alone.
        batch: Samples of one replica in a step.
        splits: Whether the network takes batches of other sizes, so that there are micro-batches.

    Raises:
        PlanError: the batch is empty.
    """
    if batch < 1:
        raise PlanError(f"a replica takes {batch} samples a step: at least 1 is needed")
    count = len(cluster.devices)
    alike = len(set(cluster.devices)) == 1
    used = [cluster] if alike else [cluster.take(k) for k in range(1, count + 1)]
    found = [shape for some in used for shape in _shapes(costs_of, some, batch, splits)]
    return sorted(found, key=_rank)


def _shapes(
    costs_of: CostsOf, cluster: ClusterDescription, batch: int, splits: bool
) -> list[Shape]:
    """All shapes that use all devices of a cluster, the fastest first."""
    count = len(cluster.devices)
    found: list[Shape] = []
    for devices in _divisors(count):
        # which links a replica uses depends on the number of its devices alone
        links = links_of(cluster, devices)
        for microbatches in _divisors(batch, _MOST_MICROBATCHES) if splits else (1,):
            costs = costs_of(batch // microbatches).divided(count // devices)
            # each device needs a partition
            if devices > len(costs.names):
                continue
            for recompute in (False, True):
                problem = problem_of(costs, cluster, devices, microbatches, links, recompute)
                shapes = [*_cut(problem, count // devices, batch, recompute)]
                if devices == 1 == microbatches or devices > 1:
                    fit = _fit(problem, batch, recompute)
                    shapes = [s if s.fits else replace(s, fit=fit) for s in shapes]
                found += shapes
                if not recompute:
                    found += _copied(problem, costs, cluster, batch)
                # one device, or one micro-batch, would hold as much as before
                if devices == 1 or microbatches == 1 or all(shape.fits for shape in shapes):
                    break
    found.sort(key=_rank)
    chains = [
        k
        for k, s in enumerate(found)
        if s.stages_per_device == 1 < s.devices_per_replica and not s.copies
    ]
    for number in chains[:_REFINED]:
        found[number] = _refined(found[number], costs_of, cluster, batch)
    dealt = (_dealt(shape, costs_of, cluster, batch) for shape in found if not shape.copies)
    return [*found, *filter(None, dealt)]


def _dealt(
    shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int
) -> Shape | None:
    """The same shape, whose replicas take samples by their speed; None: they are alike."""
    devices, slices = shape.devices_per_replica, shape.microbatches
    speeds = cluster.relative_speeds
    chains = [speeds[k : k + devices] for k in range(0, len(speeds), devices)]
    slowest = [min(column) for column in zip(*chains)]
    rates = [min(map(truediv, chain, slowest)) for chain in chains]
    shares = deal(shape.replicas * batch, rates)
    if len(set(shares)) == 1 or min(shares) < slices:
        return None
    costs = costs_of(batch // slices).divided(shape.replicas)
    links = links_of(cluster, devices)
    parts = [
        problem_of(
            *(costs.scaled(share / batch), cluster, devices, slices, links, shape.recompute),
            replica=replica,
        )
        for replica, share in enumerate(shares)
    ]
    found = [
        _shape(part, shape.ends, _chain_of(shape), shape.replicas, batch, shape.search)
        for part in parts
    ]
    step_s = max(each.step_s for each in found)
    busy_s = sum((1 - each.bubble) * each.step_s for each in found)
    return replace(
        shape,
        step_s=step_s,
        bubble=max(0.0, 1 - busy_s / (len(found) * step_s)) if step_s else 0.0,
        lacking_bytes=max(each.lacking_bytes for each in found),
        shares=shares,
    )


def fastest(shapes: Sequence[Shape]) -> Shape:
    """The first shape that fits.

    Raises:
        PlanError: none does; the text says what lacks where, and what would fit.
    """
    for shape in shapes:
        if shape.fits:
            return shape
    # of many shapes that do not fit the text tells of one
    nearest = min(shapes, key=lambda shape: shape.lacking_bytes)
    tried = [shape.fit for shape in shapes if shape.fit is not None]
    numbers = f" What lacks for each: {what_lacks(tried)}. {what_would_fit(tried)}" if tried else ""
    raise PlanError(
        f"the network does not fit in any shape on these devices; nearest is {nearest}, where a "
        f"device lacks {gigabytes(nearest.lacking_bytes)}.{numbers} What helps: more or larger "
        "devices, a smaller batch, or an optimizer with less state"
    )


def plan_of(shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int) -> Plan:
    """The plan of a shape from `rank_shapes`, which was given the same."""
    used = cluster.take(shape.replicas * shape.devices_per_replica)
    problem = _problem_of_shape(shape, costs_of, used, batch)
    table = problem.table
    if shape.copies:
        copied = _with_copies(problem, shape.copies, table, used)
        firsts = [*map(min, owners_of(shape.copies))]
        costs = replace(copied.stage_costs(shape.ends), devices=firsts)
    else:
        costs = problem.costs(shape.ends, _chain_of(shape))
    return Plan(
        replicas=shape.replicas,
        stages=len(shape.ends),
        microbatches=shape.microbatches,
        schedule="gpipe",
        cuts=tuple(table.names[end] for end in shape.ends[:-1]),
        devices=shape.devices,
        capacities=tuple(problem.speeds),
        rows=table.rows(shape.ends, costs),
        predicted_step_s=shape.step_s,
        objective="step",
        allocation=shape.search,
        recompute=shape.recompute,
        shares=shape.shares,
    )


def _chain_of(shape: Shape) -> list[int]:
    """The device of each stage of a shape without copies."""
    return [device for device in shape.devices if isinstance(device, int)]


def _problem_of_shape(
    shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int
) -> StepProblem:
    costs = costs_of(batch // shape.microbatches).divided(shape.replicas)
    devices, slices = shape.devices_per_replica, shape.microbatches
    return problem_of(costs, cluster, devices, slices, recompute=shape.recompute)


def problem_of(
    costs: PartitionTable,
    cluster: ClusterDescription,
    devices: int,
    microbatches: int,
    links: Links | None = None,
    recompute: bool = False,
    replica: int | None = None,
) -> StepProblem:
    """The step of replicas with so many devices each, on all devices of a cluster.

    With `recompute` a backward takes a forward more; of all micro-batches a device then keeps the
    inputs (at most what crosses the widest cut), and the activations of one.

    All replicas wait for each other, so a ``pp_rank`` is as fast and as large as its smallest
    device, and a link as slow as its slowest; with the number of a `replica`, its devices count.
    """
    replicas = len(cluster.devices) // devices
    speeds, limits = cluster.relative_speeds, cluster.memory_limits
    if replica is not None:
        mine = slice(replica * devices, (replica + 1) * devices)
        speeds, limits = speeds[mine], limits and limits[mine]
    table = replace(
        costs,
        memory_bytes=costs.held_bytes(1 if recompute else microbatches),
        reduce_s=_reduce_s(costs, cluster, devices, replicas),
    )
    if recompute:
        table = table.recomputed()
        kept = microbatches * max(costs.cut_bytes, default=0)
        limits = limits and tuple(max(0.0, limit - kept) for limit in limits)
    return StepProblem(
        table=table,
        speeds=[min(speeds[k::devices]) for k in range(devices)],
        links=links or links_of(cluster, devices),
        microbatches=microbatches,
        memory_limits=[min(limits[k::devices]) for k in range(devices)] if limits else (),
    )


def _fit(problem: StepProblem, batch: int, recompute: bool) -> Fit:
    """The same shape as far as its memory goes; without limits it lacks nothing."""
    limits, microbatches = problem.memory_limits, problem.microbatches
    way = Way(stages=problem.m, microbatches=microbatches, recompute=recompute)
    fit = Fit.of(problem.table, way, limits, batch)
    # the problem has taken what is crossing away
    return replace(fit, limits=[limit + recompute * fit.crossing_bytes for limit in limits])


def links_of(cluster: ClusterDescription, devices: int) -> Links:
    """The links between the devices of a replica: of all replicas the slowest."""
    ranks = np.arange(len(cluster.devices)).reshape(-1, devices)
    seconds, latency = np.zeros((devices, devices)), np.zeros((devices, devices))
    if devices > 1:
        # from the outermost level, which joins all, to the innermost
        for level in reversed(cluster.levels):
            groups = ranks // level.devices
            # replicas with the same pattern of groups have the same links
            patterns = np.unique(groups - groups[:, :1], axis=0)
            joined = np.ones((devices, devices), dtype=bool)
            for row in patterns:
                joined &= row[:, None] == row[None, :]
            seconds[joined] = 1 / level.bandwidth_bytes_per_s
            latency[joined] = level.latency_s
    return Links(seconds_per_byte=seconds.tolist(), latency_s=latency.tolist())


def ring_s(level: Level | None, size_bytes: float, replicas: int, sharers: int = 1) -> float:
    """Seconds of a ring all-reduce over replicas whose links `sharers` rings use at once."""
    if level is None or replicas < 2:
        return 0.0
    carried = 2 * (replicas - 1) / replicas * size_bytes * sharers
    return carried / level.bandwidth_bytes_per_s + 2 * (replicas - 1) * level.latency_s


def _reduce_s(
    costs: PartitionTable, cluster: ClusterDescription, devices: int, replicas: int
) -> tuple[float, ...]:
    if replicas == 1:
        return ()
    level = cluster.level(range(0, len(cluster.devices), devices))
    if level is None:
        return ()
    # each stage has a ring of its own
    return _rings_s(level, costs.gradient_bytes, replicas, min(devices, _inside(cluster, level)))


def _inside(cluster: ClusterDescription, level: Level | None) -> int:
    """Devices that share the links of a level: those of a group of the level inside.

    A ring goes through each such group once.
    """
    place = cluster.levels.index(level) if level is not None else 0
    return cluster.levels[place - 1].devices if place else 1


def _rings_s(
    level: Level | None, sizes: Sequence[float], owners: int, sharers: int
) -> tuple[float, ...]:
    """Seconds of the all-reduce of each partition, over so many owners."""
    times = [ring_s(level, size, owners, sharers) for size in sizes]
    waits = ring_s(level, 0.0, owners)
    # the first partition's is the last to begin: there the latency counts
    return (*times[:1], *(time - waits for time in times[1:]))


def _copied(
    problem: StepProblem, costs: PartitionTable, cluster: ClusterDescription, batch: int
) -> Iterator[Shape]:
    """Shapes of two or three stages with copies, where devices or links are not alike."""
    devices, replicas = problem.m, len(cluster.devices) // problem.m
    alike = len(set(cluster.devices)) == 1 and len(cluster.levels) < 2
    if alike or not 2 < devices <= _MOST_COPIED or problem.microbatches > 2 * _MOST_COPIED:
        return
    fronts = [(devices - 1,), *((k, devices - 1 - k) for k in range(1, devices - 1))]
    for copies in ((*front, 1) for front in fronts):
        if max(copies) == 1 or problem.microbatches < max(copies):
            continue
        copied = _with_copies(problem, copies, costs, cluster)
        try:
            ends, all_tried = best_cuts(copied)
        except PlanError:  # the chain of as many devices says what lacks
            continue
        step_s, of_each = copied.step_time_s(ends), copied.costs(ends)
        busy_s = sum(
            len(range(number, problem.microbatches, count)) * (f + b) + step
            for count, *rows in zip(copies, of_each.forward_s, of_each.backward_s, of_each.step_s)
            for number, (f, b, step) in enumerate(zip(*rows))
        )
        yield Shape(
            replicas=replicas,
            devices_per_replica=devices,
            stages_per_device=1,
            microbatches=problem.microbatches,
            ends=tuple(ends),
            devices=owners_of(copies),
            step_s=step_s,
            samples=replicas * batch,
            bubble=max(0.0, 1 - busy_s / (devices * step_s)) if step_s else 0.0,
            search="exact" if all_tried else "descent",
            copies=copies,
        )


def _with_copies(
    problem: StepProblem,
    copies: tuple[int, ...],
    costs: PartitionTable,
    cluster: ClusterDescription,
) -> CopiedStages:
    """The stages with copies that the devices of a chain can be, with the all-reduces of each."""
    owners, table = owners_of(copies), problem.table
    groups = [
        [k + d for k in range(0, len(cluster.devices), problem.m) for d in devices]
        for devices in owners
    ]
    levels = [cluster.level(ranks) if len(ranks) > 1 else None for ranks in groups]
    after = []
    for ranks, level in zip(groups, levels):
        sharers = min(levels.count(level), _inside(cluster, level))
        after.append(
            (
                _rings_s(level, costs.gradient_bytes, len(ranks), sharers),
                table.step_s or [0.0] * problem.n,
            )
        )
    limits = problem.memory_limits
    return CopiedStages(
        chain=StepProblem(
            table=table,
            speeds=of_slowest(problem.speeds, owners),
            links=Links.equal(len(copies), 1.0),
            microbatches=problem.microbatches,
            memory_limits=of_slowest(limits, owners) if limits else (),
        ),
        copies=copies,
        speeds=problem.speeds,
        links=problem.links,
        after=after,
    )


def _cut(problem: StepProblem, replicas: int, batch: int, recompute: bool) -> Iterator[Shape]:
    devices = problem.m
    # a device keeps inputs for each of its stages, so there recomputation is for single ones
    looped = devices > 1 and not recompute
    for turns in range(1, 1 + (_MOST_TURNS if looped else 1)):
        order = [*range(1, devices), 0] * turns
        if len(order) > problem.n:
            return
        ends = balanced_ends(problem, order)
        if ends is None:  # show what lacks
            ends = balanced_ends(_unlimited(problem), order)
        if ends is not None:
            shape = _shape(problem, ends, order, replicas, batch, "balanced")
            yield replace(shape, recompute=recompute)


def _refined(shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int) -> Shape:
    """The same cut by the dynamic programme, if that is quick and better."""
    problem = _problem_of_shape(shape, costs_of, cluster, batch)
    if problem.n * problem.m > _QUICK:
        return shape
    try:
        ends, step_s = best_chain(problem, _chain_of(shape))
    except PlanError:
        return shape
    if shape.fits and step_s >= shape.step_s:
        return replace(shape, search="dynamic")  # the exact search found no faster chain
    refined = _shape(problem, ends, _chain_of(shape), shape.replicas, batch, "dynamic")
    return replace(refined, recompute=shape.recompute)


def _shape(
    problem: StepProblem,
    ends: Sequence[int],
    order: Sequence[int],
    replicas: int,
    batch: int,
    search: str,
) -> Shape:
    free = _unlimited(problem)
    step_s = free.step_time_s(ends, order)
    costs = free.costs(ends, order)
    busy_s = problem.microbatches * (sum(costs.forward_s) + sum(costs.backward_s))
    busy_s += sum(costs.step_s)
    lacks = [h - limit for h, limit in zip(problem.held(ends, order), problem.memory_limits)]
    fits = problem.fits(ends, order)
    return Shape(
        replicas=replicas,
        devices_per_replica=problem.m,
        stages_per_device=len(order) // problem.m,
        microbatches=problem.microbatches,
        ends=tuple(ends),
        devices=tuple(order),
        step_s=step_s,
        samples=replicas * batch,
        bubble=max(0.0, 1 - busy_s / (problem.m * step_s)) if step_s else 0.0,
        search=search,
        lacking_bytes=0.0 if fits else max(lacks),
    )


def _unlimited(problem: StepProblem) -> StepProblem:
    return replace(problem, memory_limits=())


def _rank(shape: Shape) -> tuple[bool, float, int, int]:
    """What fits first, then by speed; of equals, but for rounding, the simplest."""
    rate = float(f"{shape.samples_per_s:.9g}")
    return not shape.fits, -rate, len(shape.ends), shape.microbatches


@lru_cache
def _divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(number, most or number) + 1) if number % d == 0)
