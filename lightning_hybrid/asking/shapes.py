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
from functools import lru_cache, partial
from itertools import combinations, pairwise

from lightning_hybrid.asking.arrangements import MOST_TURNS, Arrangement, Arrangements, improve
from lightning_hybrid.asking.cluster_description import ClusterDescription
from lightning_hybrid.asking.step_problems import CostsOf, unlimited
from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning import (
    Fit,
    Plan,
    Way,
    best_chain,
    best_cuts,
    gigabytes,
    improved,
    owners_of,
    what_lacks,
    what_would_fit,
)

_MOST_MICROBATCHES = 64
"""Micro-batches that are tried at most. More of them hold no less, since all are in flight."""
_REFINED = 5
"""Chains, loops and shapes with copies that are looked at again."""
_MOST_COPIED = 8
"""Devices of a replica whose stages have copies, at most."""
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
    """An arrangement: how fast it is, and whether it fits.

    Attributes:
        arrangement: numbers of replicas, stages and micro-batches, devices and cuts.
        step_s: predicted seconds of a step.
        samples: number of samples of all replicas in a step.
        bubble: share of the devices' time in which they do not compute.
        search: what found the cuts: `balanced` or `dynamic`; with copies `exact` or `descent`.
        lacking_bytes: what the fullest device lacks; 0: it fits.
        shares: samples that each replica takes in a step; empty: all take as many.
        fit: of what does not fit, what lacks if each device has one stage.
    """

    arrangement: Arrangement
    step_s: float
    samples: int
    bubble: float
    search: str
    lacking_bytes: float = 0.0
    shares: tuple[int, ...] = ()
    fit: Fit | None = None

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
        return f"{len(self.arrangement.copies)}{self._copies}"

    @property
    def _copies(self) -> str:
        copies = "-".join(map(str, self.arrangement.copies))
        return f" ({copies} copies)" if self.arrangement.has_copies else ""

    def __str__(self) -> str:
        it = self.arrangement
        taking = f" with {', '.join(map(str, self.shares))} samples" if self.shares else ""
        loop = f" x {it.turns} a device" if it.turns > 1 else ""
        return (
            f"{it.replicas} replica{'s' * (it.replicas > 1)}{taking} x {len(it.copies)} "
            f"stage{'s' * (it.size > 1)}{self._copies}{loop}, "
            f"{it.microbatches} micro-batch{'es' * (it.microbatches > 1)}"
            f"{', activations computed again' * it.recompute}"
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
    slices = _divisors(batch, _MOST_MICROBATCHES) if splits else (1,)
    space = Arrangements(costs_of, cluster, batch, slices)
    everyone = tuple(range(len(cluster.devices)))
    found = _shapes(space, everyone, len(everyone))
    if len(set(cluster.devices)) > 1:
        found += _joint(space, found)
    return sorted(found, key=_rank)


def _joint(space: Arrangements, found: Sequence[Shape]) -> list[Shape]:
    """Shapes on unlike devices, also without some of them: the best first devices, and of all."""
    count, speeds = len(space.cluster.devices), space.cluster.relative_speeds
    everyone = tuple(range(count))
    by_speed = tuple(sorted(everyone, key=lambda k: -speeds[k]))
    seeds, alone = [*found], list[Shape]()
    # all smaller numbers of many devices would take long
    for number in (k for k in range(1, count + 1) if k <= _ALL_SIZES or count % k == 0):
        if number < count:
            alone += _shapes(space, everyone, number, copied=count <= _ALL_COPIED)
        if by_speed != everyone:
            seeds += _shapes(space, by_speed, number, copied=count <= _ALL_COPIED)
    starts: dict[object, Arrangement] = {}
    for shape in sorted([*seeds, *alone], key=_rank):
        genes = shape.arrangement
        if shape.fits and len(starts) < _STARTS:
            starts.setdefault((genes.replicas, genes.copies, genes.turns), genes)
    best = improve(space, [*starts.values()])
    return alone if best is None else [*alone, _shape(space, best, "descent")]


def _shape(space: Arrangements, genes: Arrangement, search: str, *, equal: bool = False) -> Shape:
    """What an arrangement takes, with the best shares of its replicas or with equal ones."""
    step_s, shares = (space.equal_s(genes), ()) if equal else space.timed(genes)
    lacking = 0.0
    if step_s == float("inf"):  # show what lacks
        problem = space.whole(genes)
        held = zip(problem.held(genes.ends, genes.chain), problem.memory_limits)
        lacking = max(size - limit for size, limit in held)
        step_s = unlimited(problem).step_time_s(genes.ends, genes.chain)
    return Shape(
        arrangement=genes,
        step_s=step_s,
        samples=genes.replicas * space.batch,
        bubble=space.bubble(genes, step_s, shares),
        search=search,
        lacking_bytes=lacking,
        shares=shares,
    )


def _shapes(
    space: Arrangements, order: tuple[int, ...], count: int, *, copied: bool = True
) -> list[Shape]:
    """All shapes that use so many devices, the first ones of an order; the fastest first."""
    found: list[Shape] = []
    devices = (*order[:count], *sorted(order[count:]))
    for size in _divisors(count):
        # each device needs a partition
        if size > space.partitions:
            continue
        for slices in space.numbers:
            for recompute in (False, True):
                plain = space.seated(
                    Arrangement(devices, count // size, (1,) * size, 1, slices, recompute, ())
                )
                # a device keeps inputs for each of its stages: there recomputation is for one
                turns = range(1, 1 + (MOST_TURNS if size > 1 and not recompute else 1))
                cut = (space.recut(replace(plain, turns=number)) for number in turns)
                shapes = [_shape(space, g, "balanced", equal=True) for g in cut if g is not None]
                if size > 1 or slices == 1:
                    fit = _fit(space, plain)
                    shapes = [s if s.fits else replace(s, fit=fit) for s in shapes]
                found += shapes
                if copied and not recompute and space.may_copy:
                    found += _copied(space, plain)
                # one device, or one micro-batch, would hold as much as before
                if size == 1 or slices == 1 or all(shape.fits for shape in shapes):
                    break
    found.sort(key=_rank)
    for number in _promising(found):
        found[number] = _refined(space, found[number])
    alone = (shape for shape in found if not shape.arrangement.has_copies)
    dealt = (_shape(space, shape.arrangement, shape.search) for shape in alone)
    return [*found, *(shape for shape in dealt if shape.shares)]


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


def plans_of(
    shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int
) -> list[Plan]:
    """The plan of a shape from `rank_shapes`, which was given the same; as each replica runs it.

    Replicas with unequal shares have other times and other memory, and nothing else of their own.
    The step of the plan is that of the replica with the longest.
    """
    genes, shares = shape.arrangement, shape.shares
    space = Arrangements(costs_of, cluster, batch, (genes.microbatches,))
    whole = space.whole(genes)
    if genes.has_copies:
        copied = space.copied(genes.used, genes.copies, genes.microbatches)
        costs = replace(
            copied.stage_costs(genes.ends), devices=[*map(min, owners_of(genes.copies))]
        )
    else:
        costs = whole.costs(genes.ends, genes.chain)
    table, seats = whole.table, sorted(genes.used)
    # of the devices only those that are used have a rank
    ranks = tuple(map(seats.index, genes.used))
    plan = Plan(
        replicas=genes.replicas,
        stages=len(genes.ends),
        microbatches=genes.microbatches,
        schedule="gpipe",
        cuts=tuple(table.names[end] for end in genes.ends[:-1]),
        devices=owners_of(genes.copies) if genes.has_copies else tuple(genes.chain),
        capacities=tuple(whole.speeds),
        rows=table.rows(genes.ends, costs),
        predicted_step_s=shape.step_s,
        objective="step",
        allocation=shape.search,
        recompute=genes.recompute,
        shares=shares,
        ranks=() if ranks == tuple(range(len(seats))) else ranks,
    )
    plans = [plan] * genes.replicas
    for replica, share in enumerate(shares):
        mine = space.of_replica(genes, share, replica)
        rows = mine.table.rows(genes.ends, mine.costs(genes.ends, genes.chain))
        step_s = mine.step_time_s(genes.ends, genes.chain)
        plans[replica] = replace(plan, rows=rows, predicted_step_s=step_s)
    return plans


def _fit(space: Arrangements, genes: Arrangement) -> Fit:
    """The same shape as far as its memory goes; without limits it lacks nothing."""
    problem = space.whole(genes)
    way = Way(stages=genes.size, microbatches=genes.microbatches, recompute=genes.recompute)
    fit = Fit.of(problem.table, way, problem.memory_limits, space.batch)
    # the problem has taken what is crossing away
    kept = genes.recompute * fit.crossing_bytes
    return replace(fit, limits=[limit + kept for limit in problem.memory_limits])


def _copied(space: Arrangements, plain: Arrangement) -> Iterator[Shape]:
    """Shapes of two or three stages with copies, as far as they fit."""
    size = plain.size
    if not 2 < size <= _MOST_COPIED:
        return
    for cuts in [(k,) for k in range(1, size)] + [*combinations(range(1, size), 2)]:
        copies = tuple(b - a for a, b in pairwise((0, *cuts, size)))
        genes = space.recut(replace(plain, copies=copies)) if max(copies) > 1 else None
        # of what does not fit, the chain of as many devices says what lacks
        if genes is not None and space.equal_s(genes) < float("inf"):
            yield _shape(space, genes, "balanced", equal=True)


def _promising(found: Sequence[Shape]) -> Iterator[int]:
    """Indices in ``found`` of its first `_REFINED` chains, loops, and shapes with copies each."""
    kinds: dict[object, list[int]] = {}
    for number, shape in enumerate(found):
        genes = shape.arrangement
        if genes.size > 1:
            kinds.setdefault((genes.turns > 1, genes.has_copies), []).append(number)
    for numbers in kinds.values():
        yield from numbers[:_REFINED]


def _refined(space: Arrangements, shape: Shape) -> Shape:
    """The same cut by the dynamic programme, or a loop or copies otherwise, where that is quick."""
    genes = shape.arrangement
    problem, chain = space.whole(genes), genes.chain
    if problem.n * problem.m > _QUICK:
        return shape
    search = "descent"
    try:
        if genes.has_copies:
            copied = space.copied(genes.used, genes.copies, genes.microbatches)
            ends, all_tried = best_cuts(copied)
            search = "exact" if all_tried else search
        elif genes.turns > 1:
            ends = improved([*genes.ends], partial(problem.step_time_s, devices=chain))
        else:
            ends, _ = best_chain(problem, chain)
            search = "dynamic"
    except PlanError:
        return shape
    found = _shape(space, replace(genes, ends=tuple(ends)), search, equal=True)
    # a search that finds nothing faster leaves the cuts as they are
    worse = shape.fits and found.step_s >= shape.step_s
    return replace(shape, search=search) if worse else found


def _rank(shape: Shape) -> tuple[bool, float, int, int]:
    """What fits first, then by speed; of equals, but for rounding, the simplest."""
    rate = float(f"{shape.samples_per_s:.9g}")
    return not shape.fits, -rate, len(shape.arrangement.ends), shape.arrangement.microbatches


@lru_cache
def _divisors(number: int, most: int | None = None) -> tuple[int, ...]:
    return tuple(d for d in range(1, min(number, most or number) + 1) if number % d == 0)
