"""Rank shapes: numbers of replicas, stages, stages per device and micro-batches, by their speed.

A shape uses R replicas of S devices. Each device has v stages (v > 1: a *loop*, in which a
micro-batch passes all devices v times; this shortens the bubble and crosses more cuts). Each
replica splits its batch into M micro-batches. As in Lightning, every replica has a batch of its
own, so shapes with different R are compared by samples per second and not by the time of a step.

The Trainer, when its sizes are left open, and the command `plan` call the same function,
`rank_shapes`. Both get the *plain* shapes: all N devices are used, R S = N, and v = 1. All plain
shapes are first estimated: they are cut by `balanced`, with times in proportion to those of a whole
batch. Then, the best estimate first, each is measured at its own micro-batches and planned as a run
plans it (`planner.plan_within`), until no estimate is better than the best plan. So no shape is
measured that cannot be the best.

The command also gets shapes that the Trainer does not choose by itself (*wide* search): loops,
copies of stages, and if devices are not alike unequal shares of the R batches (``BySpeed``), other
orders of the devices, and shapes that leave devices out (``Trainer(devices=...)``).

If stages do not fit into memory, a shape is tried once more with recomputation: stages then hold
the activations of one micro-batch and run their forward again in the backward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, combinations, pairwise

from lightning_hybrid.errors import PlanError
from lightning_hybrid.planning.arrangements import MOST_TURNS, Arrangement, Arrangements, improve
from lightning_hybrid.planning.cluster_description import ClusterDescription
from lightning_hybrid.planning.copied_stages import best_cuts, devices_of_copies
from lightning_hybrid.planning.looped_placements import improved
from lightning_hybrid.planning.memory_check import MemoryFit, gigabytes, what_lacks, what_would_fit
from lightning_hybrid.planning.memory_needed import remaining
from lightning_hybrid.planning.microbatch_numbers import divisors, numbers_to_try
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.plan import Plan
from lightning_hybrid.planning.planner import plan_within
from lightning_hybrid.planning.run_cluster import order_ranks
from lightning_hybrid.planning.search import AUTO, PlanSettings, Replica
from lightning_hybrid.planning.shape_costs import CostsOf, unlimited
from lightning_hybrid.planning.shares import share_samples
from lightning_hybrid.schedules import INSIDE, STREAMED

SPARE = 0.1
"""Fraction of each device's memory that `rank_shapes` leaves free if any shape fits so: the memory
of a step is predicted, and what the process and other code take is not known."""
WORTH_STAGES = 0.95
"""Shapes of several stages are preferred to replicas of one stage only if their predicted time per
sample is at most this fraction: predictions are off by some percent, and replicas alone train
exactly as under DDP."""
_MOST_MICROBATCHES = 64
"""Largest number of micro-batches that a wide search tries. More of them need no less memory where
all are in flight."""
_REFINED = 5
"""Number of loops, and number of shapes with copies, for which better cuts are searched."""
_MOST_COPIED = 8
"""Largest number of devices of a replica for which stages with copies are tried."""
_ALL_SIZES = 8
"""Every number of unlike devices up to this one is tried; of larger numbers only the divisors of
the number of all devices."""
_ALL_COPIED = 4
"""Largest number of unlike devices for which `_joint` tries all shapes with copies; with more
devices `improve` alone searches them."""
_MOST_IMPROVED = 100
"""Largest number of shapes that `improve` is given to begin with."""
_QUICK = 400
"""Largest product of partitions and devices for which a search for cuts takes a moment."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a run.

    Attributes:
        replicas: number of replicas.
        stages: number of devices of a replica.
        microbatches: number of micro-batches of a replica's batch.
    """

    replicas: int
    stages: int
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class ShapeRequest:
    """Limits on the shapes to consider, from the user and from the networks.

    Attributes:
        settings: options of the user for plans.
        microbatches: number of micro-batches that the user has set; None: it is chosen too.
        splits: function from a number of micro-batches to whether a batch may be split so.
        allowed: function from the numbers of replicas and of devices of a replica to whether they
            may be chosen.
        by_speed: whether fast replicas take more samples than slow ones.
        inside: for each network, whether backwards may run inside of its calls (schedule `1f1b`);
            empty: for none.
        wide: False: only plain shapes are looked at (one stage per device, on all devices). True:
            also loops, stages with copies, unequal shares, and other orders and numbers of devices.
    """

    settings: PlanSettings = field(default_factory=PlanSettings)
    microbatches: int | None = None
    splits: Callable[[int], bool] = lambda microbatches: True
    allowed: Callable[[int, int], bool] = lambda replicas, stages: True
    by_speed: bool = False
    inside: tuple[bool, ...] = ()
    wide: bool = False

    def ways(self, size: int, slices: int) -> list[tuple[bool, bool]]:
        """List how a plain shape may treat activations and backwards, the fastest way first.

        Args:
            size: number of devices of a replica.
            slices: number of micro-batches.

        Returns:
            For each way two values: whether activations are recomputed, and whether backwards run
            inside of calls.
        """
        recompute: bool | str = self.settings.recompute if size > 1 else False
        # with one micro-batch recomputation saves no memory
        both = (False, True) if slices > 1 else (False,)
        again = both if recompute == "auto" else (bool(recompute),)
        may = size > 1 and slices > 1 and self.settings.may_go_inside and any(self.inside)
        sides = {AUTO: (False, True), INSIDE: (True,)} if may else {}
        inside = sides.get(self.settings.schedule, (False,))
        return [(a, i) for a in again for i in inside]

    def numbers(self, size: int, batch: int) -> list[int]:
        """List the numbers of micro-batches to try for a plain shape, rising.

        Args:
            size: number of devices of a replica.
            batch: number of samples in a replica's batch.
        """
        if size > 1 and self.microbatches is not None:
            return [self.microbatches]
        return numbers_to_try(size, batch, self.splits)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A way to use a cluster, with its predicted speed and whether it fits into memory.

    Attributes:
        arrangement: numbers of replicas, stages and micro-batches, devices and cuts.
        step_s: predicted seconds of a step.
        samples: number of samples of all replicas in a step.
        bubble: share of the devices' time in which they do not compute.
        search: what found the cuts: `balanced` or `dynamic`; with copies `exact` or `descent`.
        lacking_bytes: bytes that the fullest device lacks; 0 or less: the shape fits.
        shares: samples that each replica takes in a step; empty: equal numbers.
        fit: if a plain shape does not fit, the memory that each device lacks; else None.
        plans: if the shape is plain and was planned, the plan of each network; else empty.
        refusal: error text if the shape cannot be planned for another reason than memory; empty:
            none.
        plain: whether the Trainer may choose this shape by itself when its sizes are left open.
    """

    arrangement: Arrangement
    step_s: float
    samples: int
    bubble: float
    search: str
    lacking_bytes: float = 0.0
    shares: tuple[int, ...] = ()
    fit: MemoryFit | None = None
    plans: tuple[Plan, ...] = ()
    refusal: str = ""
    plain: bool = False

    @property
    def sizes(self) -> Sizes:
        """Numbers of replicas, of devices of a replica, and of micro-batches."""
        it = self.arrangement
        return Sizes(replicas=it.replicas, stages=it.size, microbatches=it.microbatches)

    @property
    def batch_s(self) -> float:
        """Predicted seconds of a step divided by its number of batches, one for each replica."""
        return self.step_s / self.arrangement.replicas

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory for its stages."""
        return self.lacking_bytes <= 0

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second of all replicas together."""
        return self.samples / self.step_s if self.step_s else float("inf")

    @property
    def stages(self) -> str:
        """Number of stages as text, with their copies if any has several: ``2 (3-1 copies)``."""
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
            f"{', backwards inside of calls' * it.inside}"
        )


def rank_shapes(
    networks: Sequence[CostsOf],
    cluster: ClusterDescription,
    batch: int,
    asked: ShapeRequest | None = None,
    *,
    spare: float = SPARE,
) -> list[Shape]:
    """Rank the ways (shapes) to use a cluster: those that fit into memory first, the fastest first.

    They are compared by predicted time per sample. Replicas of one device win unless several
    devices a replica need less than :data:`WORTH_STAGES` of their time.

    Args:
        networks: For each network a function from samples per micro-batch to the costs of its
            partitions; a call may measure. Give exactly one if ``asked.wide`` (also if ``asked`` is
            None): wide shapes look at the first alone.
        cluster: The devices; all are used. If ``asked.wide`` and they are not alike, shapes are
            also tried that leave devices out: on the first k as listed, and on the k fastest.
        batch: Samples of one replica in a step.
        asked: Limits on the shapes; None: all shapes (wide).
        spare: Fraction of each device's memory that is kept free; if no shape fits so, all of the
            memory may be used.

    Raises:
        PlanError: the batch is empty.
    """
    if batch < 1:
        raise PlanError(f"a replica takes {batch} samples a step: at least 1 is needed")
    asked, found = asked or ShapeRequest(wide=True), list[Shape]()
    for left in (spare, 0.0):
        found = _ranked(networks, cluster.sparing(left), batch, asked)
        if any(shape.fits for shape in found) or not spare:
            break
    return found


def _ranked(
    networks: Sequence[CostsOf], cluster: ClusterDescription, batch: int, asked: ShapeRequest
) -> list[Shape]:
    possible = divisors(batch, _MOST_MICROBATCHES)
    numbers = [m for m in possible if m == 1 or asked.splits(m)] if asked.wide else [1]
    spaces = [
        Arrangements(costs_of, cluster, batch, numbers, may_go_inside=inside)
        for costs_of, inside in zip(networks, asked.inside or [False] * len(networks))
    ]
    everyone = tuple(range(len(cluster.devices)))
    found = [replace(shape, plain=True) for shape in _plain(spaces, asked, everyone)]
    if asked.wide:
        found += _wide(spaces[0], found, everyone)
        if len(set(cluster.devices)) > 1:
            found += _joint(spaces[0], asked, found)
    return sorted(found, key=_rank)


def _plain(
    spaces: Sequence[Arrangements],
    asked: ShapeRequest,
    order: Sequence[int],
    number: int | None = None,
) -> list[Shape]:
    """Estimate all plain shapes on some devices, and plan those that may be the best.

    Args:
        spaces: arrangements of each network.
        asked: limits on the shapes.
        order: numbers of the devices.
        number: how many devices are used, the first of `order`; None: all.

    Returns:
        All plain shapes on these devices; those that were not planned have estimated times.
    """
    seats, speeds = order[:number], spaces[0].cluster.relative_speeds
    estimates = [space.estimated() for space in spaces]
    guesses = []
    for size in divisors(len(seats)):
        replicas = len(seats) // size
        if not asked.allowed(replicas, size) or all(size > s.partitions for s in spaces):
            continue
        used = order_ranks([speeds[k] for k in seats], replicas, size)
        devices = (*(seats[k] for k in used), *sorted(set(range(len(speeds))) - {*seats}))
        for slices in asked.numbers(size, spaces[0].batch):
            for again, inside in asked.ways(size, slices):
                genes = Arrangement(devices, replicas, (1,) * size, 1, slices, again, (), inside)
                guesses.append(_guess(estimates, asked, genes))
                if guesses[-1].fits:
                    break
    guesses.sort(key=_rank)
    known: list[Shape] = []
    for place, guess in enumerate(guesses):
        if not guess.fits:
            break
        # Measuring takes seconds, and the shapes that are left are not better even as estimated.
        # (Estimates do not compare streams of batches, which have no fill and drain.)
        streamed = asked.settings.schedule in STREAMED
        if known and not streamed and _rank(guess) >= min(map(_rank, known)):
            break
        guesses[place] = _planned(spaces, asked, guess)
        known += [guesses[place]] * guesses[place].fits
    return guesses


def _guess(spaces: Sequence[Arrangements], asked: ShapeRequest, genes: Arrangement) -> Shape:
    """Estimate a plain shape by balanced cuts, as if each network had all of the memory for itself.

    Args:
        spaces: arrangements of each network, with estimated costs.
        asked: limits on the shapes.
        genes: the shape on its devices; its cuts are not used.

    Returns:
        The shape, with the cuts of the network that has the most partitions and the sum of the
        steps of all networks.
    """
    cut = [space.recut(_on_drivers(space, genes)) for space in spaces]
    shapes = [_shape(s, g, "balanced", equal=True) for s, g in zip(spaces, cut) if g is not None]
    space, whole = max(zip(spaces, shapes), key=lambda pair: pair[0].partitions)
    fits = [_fit(space, shape.arrangement) for space, shape in zip(spaces, shapes)]
    at, shares = whole.arrangement, tuple[int, ...]()
    if asked.by_speed and max(space.kinds(at.used, at.size)):
        shares = share_samples(at.replicas * space.batch, space.rates(at))
    return replace(
        whole,
        step_s=sum(shape.step_s for shape in shapes) * _dealt(space, at, shares),
        shares=shares,
        lacking_bytes=max(shape.lacking_bytes for shape in shapes),
        fit=next((fit for fit, shape in zip(fits, shapes) if not shape.fits), None),
    )


def _dealt(space: Arrangements, genes: Arrangement, shares: tuple[int, ...]) -> float:
    """Ratio of a step's time with unequal shares to that with equal ones.

    Args:
        space: arrangements of the network.
        genes: the arrangement, with cuts.
        shares: samples that each replica takes; empty: equal numbers, so that the result is 1.

    Returns:
        The ratio; 1 if a device lacks memory for its stages.
    """
    if not shares or not space.equal_s(genes) < float("inf"):
        return 1.0
    return space.dealt_s(genes, shares) / space.equal_s(genes)


def _on_drivers(space: Arrangements, genes: Arrangement) -> Arrangement:
    """Put a network with fewer partitions than stages on the drivers alone, as a single stage.

    Returns:
        The arrangement as it is, if the network has enough partitions.
    """
    if genes.size <= space.partitions:
        return genes
    drivers = genes.used[:: genes.size]
    others = tuple(k for k in genes.devices if k not in drivers)
    return replace(genes, devices=(*drivers, *others), copies=(1,), recompute=False, inside=False)


def _planned(spaces: Sequence[Arrangements], asked: ShapeRequest, guess: Shape) -> Shape:
    """Plan an estimated plain shape as a run would: at costs for its own micro-batch size.

    Several networks are planned one after the other, each within the memory that is left. A single
    network of many partitions and devices (see `_QUICK`) gets balanced cuts in place of a plan.

    Returns:
        The shape with its plans and their time; or, if it cannot be planned, the estimate with the
        reason in `fit` or `refusal`.
    """
    at, plans = guess.arrangement, list[Plan]()
    for space in spaces:
        genes = _on_drivers(space, replace(at, recompute=False, inside=False))
        problem = space.whole(genes)
        if problem.n * problem.m > _QUICK and len(spaces) == 1:
            cut = space.recut(at)
            return guess if cut is None else _shape(space, cut, "balanced", equal=True)
        limits = tuple(map(round, problem.memory_limits)) or None
        replica = Replica(
            replicas=at.replicas,
            stages=genes.size,
            microbatches=at.microbatches,
            capacities=problem.speeds,
            links=problem.links,
            memory_limits=remaining(limits, plans),
        )
        try:
            plans.append(_plan_within(space, problem.table, asked.settings, replica))
        except PlanError as error:
            fit = _fit(space, replace(genes, recompute=at.recompute, inside=at.inside))
            fit = replace(fit, limits=replica.memory_limits or ())
            lacks = max(fit.lacks) if fit.limits else 0.0
            refusal = "" if lacks > 0 else str(error)
            return replace(guess, lacking_bytes=max(lacks, 1.0), fit=fit, refusal=refusal)
    space, whole = max(zip(spaces, plans), key=lambda pair: pair[0].partitions)
    ends = tuple(accumulate(len(row.partitions) for row in whole.rows))
    inside = whole.schedule == INSIDE
    genes = replace(at, recompute=whole.recompute, ends=ends, inside=inside)
    step_s = sum(plan.step_s for plan in plans) * _dealt(space, at, guess.shares)
    return replace(
        guess,
        arrangement=genes,
        step_s=step_s,
        bubble=space.bubble(genes, step_s, guess.shares),
        search=whole.allocation,
        plans=tuple(plans),
    )


def _plan_within(
    space: Arrangements, table: PartitionTable, settings: PlanSettings, replica: Replica
) -> Plan:
    """Plan one network by `plan_within`.

    If the user asks for schedule `1f1b` and the network does not allow it, `gpipe` is taken.

    Args:
        space: arrangements of the network.
        table: its partitions, from a step problem.
        settings: options of the user.
        replica: the devices.

    Raises:
        PlanError: no placement fits into memory.
    """
    may = settings.may_go_inside and space.may_go_inside
    if settings.schedule == INSIDE and not may:
        settings = replace(settings, schedule="gpipe")
    return plan_within(table, settings, replica, inside=replica if may else None)


def _wide(
    space: Arrangements, plain: Sequence[Shape], order: tuple[int, ...], *, copied: bool = True
) -> list[Shape]:
    """Make the loops, shapes with copies and unequal shares on the devices of plain shapes.

    Args:
        space: arrangements of the network.
        plain: plain shapes, whose devices and numbers of replicas are used.
        order: numbers of all devices.
        copied: whether shapes with copies are made.

    Returns:
        These shapes, in no particular order; shapes with unequal shares only if they are faster
        than with equal ones.
    """
    found: list[Shape] = []
    for size, seats in {s.arrangement.size: s.arrangement.used for s in plain}.items():
        devices = (*seats, *sorted(set(order) - {*seats}))
        for slices in space.numbers:
            genes = Arrangement(devices, len(seats) // size, (1,) * size, 1, slices, False, ())
            turns = range(2, MOST_TURNS + 1 if size > 1 else 2)
            cut = (space.recut(replace(genes, turns=number)) for number in turns)
            found += (_shape(space, g, "balanced", equal=True) for g in cut if g is not None)
            if copied and space.may_copy:
                found += _copied(space, space.seated(genes))
    found.sort(key=_rank)
    for number in _promising(found):
        found[number] = _refined(space, found[number])
    alone = (shape for shape in (*plain, *found) if not shape.arrangement.has_copies)
    dealt = (_shape(space, shape.arrangement, shape.search) for shape in alone)
    return [*found, *(shape for shape in dealt if shape.shares)]


def _joint(space: Arrangements, asked: ShapeRequest, found: Sequence[Shape]) -> list[Shape]:
    """Make shapes for unlike devices: on some of them, in other orders, and one bred from the best.

    Args:
        space: arrangements of the network.
        asked: limits on the shapes.
        found: shapes on all devices, with which the breeding begins too.

    Returns:
        Shapes on the first k devices of the cluster for several k; and the bred shape, if any shape
        fits into memory.
    """
    count, speeds = len(space.cluster.devices), space.cluster.relative_speeds
    everyone = tuple(range(count))
    by_speed = tuple(sorted(everyone, key=lambda k: -speeds[k]))
    seeds, alone = [*found], list[Shape]()
    # all smaller numbers of many devices would take long
    for number in (k for k in range(1, count + 1) if k <= _ALL_SIZES or count % k == 0):
        for order, into in ((everyone, alone), (by_speed, seeds)):
            if (number < count) if order is everyone else (by_speed != everyone):
                plain = _plain([space], asked, order, number)
                into += [*plain, *_wide(space, plain, everyone, copied=count <= _ALL_COPIED)]
    starts: dict[object, Arrangement] = {}
    for shape in sorted([*seeds, *alone], key=_rank):
        genes = shape.arrangement
        if shape.fits and len(starts) < _MOST_IMPROVED:
            starts.setdefault((genes.replicas, genes.copies, genes.turns), genes)
    best = improve(space, [*starts.values()])
    return alone if best is None else [*alone, _shape(space, best, "descent")]


def _shape(space: Arrangements, genes: Arrangement, search: str, *, equal: bool = False) -> Shape:
    """Predict the time of an arrangement, and how much memory the fullest device lacks.

    Args:
        space: arrangements of the network.
        genes: the arrangement, with cuts.
        search: name of the search that has found the cuts, for `Shape.search`.
        equal: whether all replicas take equal shares; else the best shares are searched for.
    """
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


def recommended(shapes: Sequence[Shape]) -> Shape:
    """Choose the first shape that fits into memory.

    Args:
        shapes: shapes from `rank_shapes`, the best first.

    Raises:
        PlanError: no shape fits; the text says which device lacks what, and what would fit.
    """
    for shape in shapes:
        if shape.fits:
            return shape
    refusal = next((shape.refusal for shape in shapes if shape.refusal), "")
    if refusal or not shapes:
        raise PlanError(refusal or "no numbers of replicas and stages are allowed here")
    # of many shapes that do not fit the text tells of one
    simplest = sorted(shapes, key=lambda shape: shape.arrangement.microbatches)
    nearest = min(simplest, key=lambda shape: shape.lacking_bytes)
    tried = [shape.fit for shape in simplest if shape.fit is not None]
    numbers = f" What lacks for each: {what_lacks(tried)}. {what_would_fit(tried)}" if tried else ""
    raise PlanError(
        "the memory of the devices is too small for the network, whatever the shape; nearest is "
        f"{nearest}, where a device lacks {gigabytes(nearest.lacking_bytes)}.{numbers} What helps: "
        "more or larger devices, a smaller batch, or an optimizer with less state"
    )


def plans_of(
    shape: Shape, costs_of: CostsOf, cluster: ClusterDescription, batch: int
) -> list[Plan]:
    """Make the plan of each replica for a shape from `rank_shapes`.

    Args:
        shape: the shape.
        costs_of: function from samples per micro-batch to the costs of the network's partitions; as
            given to `rank_shapes`.
        cluster: the devices; as given to `rank_shapes`.
        batch: samples of one replica in a step; as given to `rank_shapes`.

    Returns:
        One plan for each replica. All are equal, unless replicas have unequal shares: then
        predicted times and memory differ, and a step takes the longest of these times.
    """
    genes, shares = shape.arrangement, shape.shares
    space = Arrangements(costs_of, cluster, batch, (genes.microbatches,))
    whole = space.whole(genes)
    table = whole.table
    if genes.has_copies:
        copied = space.copied(genes.used, genes.copies, genes.microbatches)
        table = copied.chain.table
        costs = replace(
            copied.stage_costs(genes.ends), devices=[*map(min, devices_of_copies(genes.copies))]
        )
    else:
        costs = whole.costs(genes.ends, genes.chain)
    seats = sorted(genes.used)
    # of the devices only those that are used have a rank
    ranks = tuple(map(seats.index, genes.used))
    if shape.plans:
        plan = replace(shape.plans[0], ranks=() if ranks == (*range(len(seats)),) else ranks)
        return [plan] * genes.replicas
    plan = Plan(
        replicas=genes.replicas,
        stages=len(genes.ends),
        microbatches=genes.microbatches,
        schedule=INSIDE if genes.inside and space.may_go_inside else "gpipe",
        cuts=tuple(table.names[end] for end in genes.ends[:-1]),
        devices=devices_of_copies(genes.copies) if genes.has_copies else tuple(genes.chain),
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


def _fit(space: Arrangements, genes: Arrangement) -> MemoryFit:
    """Compare the memory that an arrangement needs, whatever its cuts, with that of the devices."""
    problem = space.whole(genes)
    way = space.way(genes)
    fit = MemoryFit.of(problem.table, way, problem.memory_limits, space.batch)
    # `problem_of` has taken the inputs kept for recomputation off the limits: add them again
    kept = way.recompute * way.alive / way.microbatches * fit.crossing_bytes
    return replace(fit, limits=[limit + kept for limit in problem.memory_limits])


def _copied(space: Arrangements, plain: Arrangement) -> Iterator[Shape]:
    """Make shapes of two or three stages with copies on the devices of a plain arrangement.

    Yields:
        Those shapes that fit into memory.
    """
    size = plain.size
    if not 2 < size <= _MOST_COPIED:
        return
    for cuts in [(k,) for k in range(1, size)] + [*combinations(range(1, size), 2)]:
        copies = tuple(b - a for a, b in pairwise((0, *cuts, size)))
        genes = space.recut(replace(plain, copies=copies)) if max(copies) > 1 else None
        # shapes that do not fit are left out: the chain on as many devices says what lacks
        if genes is not None and space.equal_s(genes) < float("inf"):
            yield _shape(space, genes, "balanced", equal=True)


def _promising(found: Sequence[Shape]) -> Iterator[int]:
    """Choose the shapes for `_refined`: the first loops and the first shapes with copies.

    Args:
        found: loops and shapes with copies, the best first.

    Yields:
        Indices in ``found``, at most `_REFINED` of each of the two kinds.
    """
    kinds: dict[object, list[int]] = {}
    for number, shape in enumerate(found):
        kinds.setdefault(shape.arrangement.has_copies, []).append(number)
    for numbers in kinds.values():
        yield from numbers[:_REFINED]


def _refined(space: Arrangements, shape: Shape) -> Shape:
    """Search for better cuts of a loop or of stages with copies, unless the problem is large.

    Returns:
        The shape with the better cuts; or with its own, if none are found.
    """
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
        else:
            ends = improved([*genes.ends], partial(problem.step_time_s, devices=chain))
    except PlanError:
        return shape
    found = _shape(space, replace(genes, ends=tuple(ends)), search, equal=True)
    # a search that finds nothing faster leaves the cuts as they are
    worse = shape.fits and found.step_s >= shape.step_s
    return replace(shape, search=search) if worse else found


def _rank(shape: Shape) -> tuple[bool, float, int, int]:
    """Sort key: shapes that fit into memory first, then by predicted time per sample.

    A single stage is preferred by `WORTH_STAGES`. Of shapes that are equal but for rounding errors,
    the one with fewer stages, then with fewer micro-batches, comes first.
    """
    it, sample_s = shape.arrangement, shape.step_s / shape.samples
    rated = float(f"{sample_s * (WORTH_STAGES if it.size == 1 else 1.0):.9g}")
    return not shape.fits, rated, len(it.ends), it.microbatches
