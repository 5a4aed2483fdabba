"""Which shape: every number of replicas, stages, stages per device and micro-batches, by its speed.

A shape uses all devices of a cluster: R replicas of S devices, whose stages are v in a row on each
device (v > 1: a loop, which shortens the bubble and crosses more cuts), and M micro-batches. As in
Lightning, every replica has a batch of its own, so shapes with different R are compared by samples
per second and not by the time of a step.

First all shapes are cut by `balanced`, then the fastest ones with v = 1 by the dynamic programme of
`chains`, where it is quick. The ranks of a replica are neighbours, in the order of the devices.
Where devices are not alike, the replicas may take unequal parts of their R batches together, by
their speed (``balance="speed"``), and the last devices may be left out (``Trainer(devices=...)``).
Stages of a replica may have copies as well.
Where stages do not fit, a shape is tried once more with stages that run their forward again for the
backward and hold the activations of one micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise
from operator import truediv

from lightning_hybrid.asking.arrangements import Arrangement, Arrangements, improve
from lightning_hybrid.asking.balanced import balanced_ends
from lightning_hybrid.asking.cluster_description import ClusterDescription
from lightning_hybrid.asking.step_problems import (
    CostsOf,
    links_of,
    problem_of,
    unlimited,
    with_copies,
)
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import (
    Fit,
    PartitionTable,
    Plan,
    StepProblem,
    Way,
    best_chain,
    best_cuts,
    deal,
    gigabytes,
    improved,
    owners_of,
    what_lacks,
    what_would_fit,
)

_MOST_TURNS = 3
"""Stages per device that are tried at most."""
_MOST_MICROBATCHES = 64
"""Micro-batches that are tried at most. More of them hold no less, since all are in flight."""
_REFINED = 5
"""Chains and loops that are looked at again."""
_MOST_COPIED = 8
"""Devices of a replica whose stages have copies, at most; twice as many micro-batches."""
_ALL_SIZES = 8
"""Numbers of unlike devices that are all tried; of larger ones those that divide their number."""
_ALL_COPIED = 4
"""Unlike devices whose shapes with copies are all tried; of more they are left to the search."""
_STARTS = 100
"""Shapes that this search is given."""
_QUICK = 400
"""Partitions times devices up to which it takes a moment."""


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
        numbers: of the cluster's devices that are used, replica by replica, each with its driver
            first; empty: the first ones in their order.
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
    numbers: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the devices, where only those that are used have one; empty: in their order."""
        used = sorted(self.numbers)
        ranks = tuple(map(used.index, self.numbers))
        return () if ranks == tuple(range(len(used))) else ranks

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
    found = _shapes(costs_of, cluster, batch, splits)
    if len(set(cluster.devices)) > 1:
        found += _joint(costs_of, cluster, batch, splits, found)
    return sorted(found, key=_rank)


def _joint(
    costs_of: CostsOf,
    cluster: ClusterDescription,
    batch: int,
    splits: bool,
    found: Sequence[Shape],
) -> list[Shape]:
    """Shapes on unlike devices, also without some of them: the best first devices, and of all."""
    space = Arrangements(costs_of, cluster, batch, _microbatches(batch, splits))
    count = len(cluster.devices)
    everyone = tuple(range(count))
    speeds = cluster.relative_speeds
    by_speed = tuple(sorted(everyone, key=lambda k: -speeds[k]))
    seeds = [(shape, everyone) for shape in found]
    for order in (everyone, by_speed):
        # all smaller numbers of many devices would take long
        for number in (k for k in range(1, count + 1) if k <= _ALL_SIZES or count % k == 0):
            if number < count or order != everyone:
                some = cluster.pick(order[:number])
                shapes = _shapes(costs_of, some, batch, splits, copied=count <= _ALL_COPIED)
                seeds += [(shape, order) for shape in shapes]
    alone = [shape for shape, order in seeds[len(found) :] if order == everyone]
    starts: dict[object, Arrangement] = {}
    for shape, order in sorted(seeds, key=lambda seed: _rank(seed[0])):
        genes = _arrangement(shape, order)
        if shape.fits and len(starts) < _STARTS:
            starts.setdefault((genes.replicas, genes.copies, genes.turns), genes)
    best = improve(space, [*starts.values()])
    return alone if best is None else [*alone, _shape_of(space, best)]


def _arrangement(shape: Shape, devices: tuple[int, ...]) -> Arrangement:
    return Arrangement(
        devices=devices,
        replicas=shape.replicas,
        copies=shape.copies or (1,) * shape.devices_per_replica,
        turns=shape.stages_per_device,
        microbatches=shape.microbatches,
        recompute=shape.recompute,
        ends=shape.ends,
    )


def _shape_of(space: Arrangements, genes: Arrangement) -> Shape:
    step_s, shares = space.timed(genes)
    return Shape(
        replicas=genes.replicas,
        devices_per_replica=genes.size,
        stages_per_device=genes.turns,
        microbatches=genes.microbatches,
        ends=genes.ends,
        devices=owners_of(genes.copies) if genes.has_copies else tuple(genes.chain),
        step_s=step_s,
        samples=genes.replicas * space.batch,
        bubble=space.bubble(genes),
        search="descent",
        recompute=genes.recompute,
        shares=shares,
        copies=genes.copies if genes.has_copies else (),
        numbers=() if genes.used == tuple(range(len(genes.used))) else genes.used,
    )


def _microbatches(batch: int, splits: bool) -> tuple[int, ...]:
    return _divisors(batch, _MOST_MICROBATCHES) if splits else (1,)


def _shapes(
    costs_of: CostsOf,
    cluster: ClusterDescription,
    batch: int,
    splits: bool,
    copied: bool = True,
) -> list[Shape]:
    """All shapes that use all devices of a cluster, the fastest first."""
    count = len(cluster.devices)
    found: list[Shape] = []
    for devices in _divisors(count):
        # which links a replica uses depends on the number of its devices alone
        links = links_of(cluster, devices)
        for microbatches in _microbatches(batch, splits):
            whole = costs_of(batch // microbatches)
            costs = whole.divided(count // devices)
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
                # copies do not go together with divided states
                if copied and not recompute and not whole.state_bytes:
                    found += _copied(problem, costs, cluster, batch)
                # one device, or one micro-batch, would hold as much as before
                if devices == 1 or microbatches == 1 or all(shape.fits for shape in shapes):
                    break
    found.sort(key=_rank)
    for loops in (False, True):
        numbers = [
            k
            for k, s in enumerate(found)
            if s.devices_per_replica > 1 and not s.copies and (s.stages_per_device > 1) == loops
        ]
        for number in numbers[:_REFINED]:
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
    used = cluster.pick(shape.numbers or range(shape.replicas * shape.devices_per_replica))
    problem = _problem_of_shape(shape, costs_of, used, batch)
    table = problem.table
    if shape.copies:
        copied = with_copies(problem, shape.copies, table, used)
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
        ranks=shape.ranks,
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


def _fit(problem: StepProblem, batch: int, recompute: bool) -> Fit:
    """The same shape as far as its memory goes; without limits it lacks nothing."""
    limits, microbatches = problem.memory_limits, problem.microbatches
    way = Way(stages=problem.m, microbatches=microbatches, recompute=recompute)
    fit = Fit.of(problem.table, way, limits, batch)
    # the problem has taken what is crossing away
    return replace(fit, limits=[limit + recompute * fit.crossing_bytes for limit in limits])


def _copied(
    problem: StepProblem, costs: PartitionTable, cluster: ClusterDescription, batch: int
) -> Iterator[Shape]:
    """Shapes of two or three stages with copies."""
    devices, replicas = problem.m, len(cluster.devices) // problem.m
    if not 2 < devices <= _MOST_COPIED or problem.microbatches > 2 * _MOST_COPIED:
        return
    places = [(k,) for k in range(1, devices)] + [*combinations(range(1, devices), 2)]
    for cuts in places:
        copies = tuple(b - a for a, b in pairwise((0, *cuts, devices)))
        if max(copies) == 1 or problem.microbatches < max(copies):
            continue
        copied = with_copies(problem, copies, costs, cluster)
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
            ends = balanced_ends(unlimited(problem), order)
        if ends is not None:
            shape = _shape(problem, ends, order, replicas, batch, "balanced")
            yield replace(shape, recompute=recompute)


def _refined(shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int) -> Shape:
    """The same cut by the dynamic programme, or a loop by moving cuts, where that is quick."""
    problem, chain = _problem_of_shape(shape, costs_of, cluster, batch), _chain_of(shape)
    if problem.n * problem.m > _QUICK:
        return shape
    if shape.stages_per_device > 1:
        ends = improved([*shape.ends], lambda ends: problem.step_time_s(ends, chain))
        return _shape(problem, ends, chain, shape.replicas, batch, "descent")
    try:
        ends, step_s = best_chain(problem, chain)
    except PlanError:
        return shape
    if shape.fits and step_s >= shape.step_s:
        return replace(shape, search="dynamic")  # the exact search found no faster chain
    refined = _shape(problem, ends, chain, shape.replicas, batch, "dynamic")
    return replace(refined, recompute=shape.recompute)


def _shape(
    problem: StepProblem,
    ends: Sequence[int],
    order: Sequence[int],
    replicas: int,
    batch: int,
    search: str,
) -> Shape:
    free = unlimited(problem)
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


def _rank(shape: Shape) -> tuple[bool, float, int, int]:
    """What fits first, then by speed; of equals, but for rounding, the simplest."""
    rate = float(f"{shape.samples_per_s:.9g}")
    return not shape.fits, -rate, len(shape.ends), shape.microbatches


@lru_cache
def _divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(number, most or number) + 1) if number % d == 0)
