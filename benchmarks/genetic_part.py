"""Does the genetic part of GABRA earn its keep? Five families of problems, against its peers.

Every search may simulate the same number of steps and has the same moves:

* GABRA as it is (`allocation.black_box_gabra`), and the same without crossover;
* random restarts: descents from random placements, one after the other;
* annealing: one walk, from 3 % of the step to 0.05 %.

Families: free placements on equal devices; on unequal ones with memory limits; on two hosts with
slow links between them; replicas x stages x stages per device x micro-batches with the cuts, on 8
to 16 devices; two networks that share devices and their memory. Of each there are small problems,
of up to 10 partitions, whose placements are all gone through; those without a placement that fits
are not counted.

It earns its keep if its steps are at least 1 % shorter (median) than those of the best peer in
three families, the interval excluding 0, in no family 1 % longer, and if 95 % of the small problems
come within 1 % of the best placement. Where a search finds nothing that fits, its step is infinite.

    python benchmarks/genetic_part.py [--instances 50] [--evaluations 5000] [--small 20]

With `--joint` the problems are those of the planner instead: shape, order of unlike devices, cuts,
copies, micro-batches and shares together. All searches begin with the planner's seeds: GABRA and
the same without crossover breed from them, restarts descend from each and then from random ones,
annealing walks from the best. What is best known is the least that any of them finds, or the
planner, whose own search has as many evaluations or more.

    python benchmarks/genetic_part.py --joint [--evaluations 2000] [--seeds 3] [--problems 0 9]
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from math import exp, inf, isfinite
from multiprocessing import Pool
from time import process_time
from typing import Any

import numpy as np
from _joint_problems import NETWORKS, PROBLEMS
from _results import record
from random_clusters import BATCH
from rich.console import Console
from rich.table import Table

from lightning_hybrid.allocation.black_box_gabra import Breeding, descend, evolve, run_counted
from lightning_hybrid.errors import AllocationError
from lightning_hybrid.planning.arrangements import Arrangements, starts_of
from lightning_hybrid.planning.free_placements import FreePlacements
from lightning_hybrid.planning.partition_table import PartitionTable
from lightning_hybrid.planning.shapes import rank_shapes, recommended
from lightning_hybrid.planning.step_problem import LinkCosts, StepProblem

Rng = np.random.Generator
RESTART_PATIENCE = 150


def chain(rng: Rng, n: int) -> dict[str, Any]:
    """A network with heavy and light partitions, like the convolutional ones that are profiled."""
    forward = rng.lognormal(0.0, 0.7, n)
    return {
        "forward_s": forward.tolist(),
        "backward_s": (forward * rng.uniform(1.5, 2.5, n)).tolist(),
        "cut_bytes": rng.uniform(0.05, 0.5, n - 1).tolist(),
        "step_s": (0.1 * forward).tolist(),
    }


def free_equal(rng: Rng, n: int = 22, m: int = 3) -> FreePlacements:
    links = LinkCosts.equal(m, 1.0, 0.02)
    return FreePlacements(
        StepProblem(
            table=PartitionTable(**chain(rng, n)), speeds=[1.0] * m, links=links, microbatches=4
        )
    )


def unequal_with_memory(rng: Rng, n: int = 22, m: int = 3) -> FreePlacements:
    sizes, limits = rng.uniform(0.1, 1.0, n), rng.uniform(0.7, 1.3, m)
    limits *= 1.25 * sizes.sum() / limits.sum()
    problem = StepProblem(
        table=PartitionTable(**chain(rng, n), memory_bytes=sizes.tolist()),
        speeds=rng.uniform(0.4, 1.2, m).tolist(),
        links=LinkCosts.equal(m, 1.0, 0.02),
        microbatches=4,
        memory_limits=limits.tolist(),
    )
    return FreePlacements(problem)


def two_hosts(rng: Rng, n: int = 22, m: int = 4) -> FreePlacements:
    far = [[i // 2 != j // 2 for j in range(m)] for i in range(m)]
    links = LinkCosts(
        seconds_per_byte=[[3.0 if f else 0.3 for f in row] for row in far],
        latency_s=[[0.1 if f else 0.01 for f in row] for row in far],
    )
    return FreePlacements(
        StepProblem(
            table=PartitionTable(**chain(rng, n)), speeds=[1.0] * m, links=links, microbatches=4
        )
    )


class Shapes:
    """Replicas x devices per replica x stages per device x micro-batches, and the cuts.

    Genes are (replicas, stages per device, micro-batches, ends). A batch of 16 samples is shared by
    the replicas; a micro-batch takes a constant and a time per sample.
    """

    def __init__(self, rng: Rng, n: int = 34) -> None:
        self.n, self.devices = n, int(rng.choice([8, 12, 16]))
        self.per_sample = chain(rng, self.n)
        self.gradients = rng.lognormal(0.0, 1.0, self.n)
        self.limit = rng.uniform(0.35, 0.8)
        self._problems: dict[tuple[int, int], StepProblem] = {}
        divisors = [r for r in range(1, self.devices + 1) if self.devices % r == 0]
        self.shapes = [
            (r, v, m) for r, v, m in product(divisors, (1, 2, 3), (1, 2, 4, 8))
            if r * m <= 16 and self.devices // r * v <= self.n and not (r == self.devices and v > 1)
        ]  # fmt: skip

    def cost(self, genes: Any) -> float:
        replicas, per_device, microbatches, ends = genes
        size = self.devices // replicas
        return self._problem(replicas, microbatches).step_time_s(
            ends, [*range(1, size), 0] * per_device
        )

    def _problem(self, replicas: int, microbatches: int) -> StepProblem:
        key = replicas, microbatches
        if key not in self._problems:
            samples, size = 16 / replicas / microbatches, self.devices // replicas
            ring = 2 * (replicas - 1) / replicas
            held = 1.0 + 0.1 * 16 / replicas  # parameters, and all samples' activations
            table = PartitionTable(
                forward_s=[0.1 + samples * f for f in self.per_sample["forward_s"]],
                backward_s=[0.2 + samples * b for b in self.per_sample["backward_s"]],
                cut_bytes=[samples * c for c in self.per_sample["cut_bytes"]],
                step_s=self.per_sample["step_s"],
                reduce_s=(ring * self.gradients).tolist(),
                memory_bytes=[held] * self.n,
            )
            self._problems[key] = StepProblem(
                table=table,
                speeds=[1.0] * size,
                links=LinkCosts.equal(size, 1.0, 0.02),
                microbatches=microbatches,
                memory_limits=[self.limit * self.n * 1.5] * size,
            )
        return self._problems[key]

    def random(self, rng: Rng) -> Any:
        shape = self.shapes[int(rng.integers(len(self.shapes)))]
        stages = self.devices // shape[0] * shape[1]
        cuts = np.sort(rng.choice(self.n - 1, stages - 1, replace=False)) + 1
        return (*shape, (*cuts.tolist(), self.n))

    def _reshaped(self, shape: tuple[int, int, int], ends: tuple[int, ...]) -> Any:
        """The same cuts, thinned out or made denser, for the stages of another shape."""
        stages = self.devices // shape[0] * shape[1]
        places = np.linspace(0, len(ends), stages + 1)
        wanted = np.rint(np.interp(places, range(len(ends) + 1), (0, *ends)))[1:].astype(int)
        steps = np.arange(stages)
        mended = np.maximum.accumulate(np.maximum(wanted, 1) - steps) + steps
        mended = np.minimum(mended, self.n - steps[::-1])
        return (*shape, (*mended[:-1].tolist(), self.n))

    def cross(self, left: Any, right: Any, rng: Rng) -> Any:
        """The shape of one parent; its first cuts from the one, the last from the other."""
        shape = left[:3] if rng.random() < 0.5 else right[:3]
        one, other = self._reshaped(shape, left[3])[3], self._reshaped(shape, right[3])[3]
        place = int(rng.integers(len(one) + 1))
        return self._reshaped(shape, tuple(np.maximum.accumulate([*one[:place], *other[place:]])))

    def neighbour(self, genes: Any, rng: Rng) -> Any:
        *shape, ends = genes
        if rng.random() < 0.15:
            close = [s for s in self.shapes if sum(a != b for a, b in zip(s, shape)) == 1]
            return self._reshaped(close[int(rng.integers(len(close)))], ends)
        moved = list(ends)
        if len(moved) > 1:
            place = int(rng.integers(len(moved) - 1))
            last = place + 1 if rng.random() < 0.7 else int(rng.integers(place, len(moved)))
            step = int(rng.integers(1, 3)) * (1 if rng.random() < 0.5 else -1)
            moved[place:last] = [end + step for end in moved[place:last]]
        if any(b <= a for a, b in zip((0, *moved), moved)):
            return genes
        return (*shape, tuple(moved))


class TwoNetworks:
    """Two networks that take turns in a step, on the same devices, within one memory."""

    def __init__(self, rng: Rng, sizes: tuple[int, int] = (14, 10)) -> None:
        m = 3
        links = LinkCosts.equal(m, 1.0, 0.02)
        shared = {"speeds": [1.0, 0.8, 0.6], "links": links, "microbatches": 4}
        self.parts = [
            FreePlacements(StepProblem(table=PartitionTable(**chain(rng, n)), **shared))
            for n in sizes
        ]
        self.sizes = [rng.uniform(0.1, 1.0, part.problem.n) for part in self.parts]
        total = sum(float(sizes.sum()) for sizes in self.sizes)
        self.limits = np.array([0.4, 0.4, 0.4]) * total

    def cost(self, genes: Any) -> float:
        held = sum(
            np.bincount(labels, sizes, minlength=3) for labels, sizes in zip(genes, self.sizes)
        )
        if (held > self.limits).any():
            return inf
        return sum(part.cost(labels) for part, labels in zip(self.parts, genes))

    def random(self, rng: Rng) -> Any:
        return tuple(part.random(rng) for part in self.parts)

    def cross(self, left: Any, right: Any, rng: Rng) -> Any:
        """One network of each parent, or one of the two crossed."""
        if rng.random() < 0.5:
            return left[0], right[1]
        which = int(rng.integers(2))
        child = list(left)
        child[which] = self.parts[which].cross(left[which], right[which], rng)
        return tuple(child)

    def neighbour(self, genes: Any, rng: Rng) -> Any:
        which, changed = int(rng.integers(2)), list(genes)
        changed[which] = self.parts[which].neighbour(genes[which], rng)
        return tuple(changed)


FAMILIES: dict[str, Callable[[Rng], Any]] = {
    "free, equal devices": free_equal,
    "free, unequal devices, memory": unequal_with_memory,
    "free, two hosts": two_hosts,
    "R x S x v x M, 8 to 16 devices": Shapes,
    "two networks, shared memory": TwoNetworks,
}


SMALL: dict[str, Callable[[Rng], Any]] = {
    "free, equal devices": lambda rng: free_equal(rng, 10, 2),
    "free, unequal devices, memory": lambda rng: unequal_with_memory(rng, 10, 2),
    "free, two hosts": lambda rng: two_hosts(rng, 8, 3),
    "R x S x v x M, 8 to 16 devices": lambda rng: Shapes(rng, 10),
    "two networks, shared memory": lambda rng: TwoNetworks(rng, (6, 4)),
}


def all_placements(space: Any) -> Iterator[Any]:
    """All genes of a small problem."""
    if isinstance(space, TwoNetworks):
        yield from product(*map(all_placements, space.parts))
    elif isinstance(space, Shapes):
        for shape in space.shapes:
            stages = space.devices // shape[0] * shape[1]
            for cuts in combinations(range(1, space.n), stages - 1):
                yield (*shape, (*cuts, space.n))
    else:
        m = space.problem.m
        for labels in product(range(m), repeat=space.problem.n - 1):
            if {*labels, 0} == set(range(m)):
                yield (*labels, 0)


def annealing(
    space: Any, cost: Callable[[Any], float], rng: Rng, starts: Sequence[Any], evaluations: int
) -> None:
    genes = starts[0] if starts else space.random(rng)
    value, seen = cost(genes), {genes}
    while True:
        near = space.neighbour(genes, rng)
        if near == genes:
            continue
        changed = cost(near)
        seen.add(near)
        warmth = 0.03 * (0.0005 / 0.03) ** min(1.0, len(seen) / evaluations)
        better = changed <= value or not isfinite(value)
        if better or rng.random() < exp(-(changed / value - 1) / warmth):
            genes, value = near, changed


def restarts(
    space: Any, cost: Callable[[Any], float], rng: Rng, starts: Sequence[Any], evaluations: int
) -> None:
    for genes in starts:
        descend(space, genes, cost, rng, RESTART_PATIENCE)
    while True:
        descend(space, space.random(rng), cost, rng, RESTART_PATIENCE)


def least(search: Callable[[], tuple[Any, tuple[float, ...]]]) -> float:
    """The least step that a search finds; infinite if nothing that it saw fits."""
    try:
        return search()[1][-1]
    except AllocationError:
        return inf


def compared(
    space: Any, seed: int, evaluations: int, starts: Sequence[Any] = ()
) -> dict[str, float]:
    """The least step that each search finds, and GABRA's CPU seconds."""

    def walked(search: Callable[..., None]) -> float:
        rng = np.random.default_rng(seed)
        return least(
            lambda: run_counted(
                space, lambda cost: search(space, cost, rng, starts, evaluations), evaluations
            )
        )

    def bred(crossover: float) -> float:
        population = len(starts) or Breeding.population
        breeding = Breeding(evaluations=evaluations, population=population, crossover=crossover)
        return least(lambda: evolve(space, seed, breeding, starts))

    begun = process_time()
    found = {"GABRA": bred(Breeding.crossover), "seconds": process_time() - begun}
    peers = {
        "no crossover": bred(0.0),
        "restarts": walked(restarts),
        "annealing": walked(annealing),
    }
    return found | peers


def searches(seed: int, name: str, evaluations: int) -> dict[str, float]:
    """The same of an instance of a family."""
    return compared(FAMILIES[name](np.random.default_rng(seed)), seed, evaluations)


def small_problem(seed: int, name: str, evaluations: int) -> bool | None:
    """Whether GABRA comes within 1 % of the best placement; None: there is none that fits."""
    space = SMALL[name](np.random.default_rng(1000 + seed))
    best = min(map(space.cost, all_placements(space)))
    if best == inf:
        return None
    found = least(lambda: evolve(space, seed, Breeding(evaluations=evaluations)))
    return bool(found <= 1.01 * best)


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, 95 %, by bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def change(found: dict[str, float], peer: str) -> float:
    """By how many per cent GABRA's step is longer than a peer's."""
    ours, other = found["GABRA"], found[peer]
    return 0.0 if ours == other else 100 * (ours / other - 1)


PEERS = ("no crossover", "restarts", "annealing")


def compare(name: str, found: list[dict[str, float]], table: Table) -> tuple[float, float, float]:
    """One family: the median change against its best peer, and the interval of that."""
    seconds = sum(f["seconds"] for f in found) / len(found)
    peers = {peer: [change(f, peer) for f in found] for peer in PEERS}
    best_peer = max(peers, key=lambda peer: float(np.median(peers[peer])))
    for peer, changes in peers.items():
        low, high = interval(changes)
        shorter, longer = sum(c < -0.1 for c in changes), sum(c > 0.1 for c in changes)
        table.add_row(
            name, peer + " (best peer)" * (peer == best_peer), f"{np.median(changes):+.2f} %",
            f"{low:+.2f} to {high:+.2f} %", f"{shorter}, {longer} of {len(found)}",
            f"{seconds:.2f}",
        )  # fmt: skip
    return float(np.median(peers[best_peer])), *interval(peers[best_peer])


def joint(evaluations: int, seeds: int, numbers: Sequence[int]) -> None:
    """Print and record how far each search is from the best known of the planner's problems."""
    costs = {name: make() for name, make in NETWORKS.items()}
    worst = dict.fromkeys(("GABRA", *PEERS, "planner"), 0.0)
    slices = [m for m in range(1, BATCH + 1) if BATCH % m == 0]
    for problem, (network, cluster) in [[*PROBLEMS.items()][k] for k in numbers]:
        shapes = rank_shapes([costs[network]], cluster, BATCH, spare=0.0)
        # what the planner has searched for is not given to the others
        fitting = [shape.arrangement for shape in shapes if shape.fits]
        known = [genes for genes in fitting if genes.used == tuple(range(len(genes.used)))]
        runs = []
        for seed in range(seeds):
            space, begun = Arrangements(costs[network], cluster, BATCH, slices), process_time()
            starts = starts_of(space, known, evaluations, np.random.default_rng(seed))
            seeds_s = process_time() - begun
            runs.append(compared(space, seed, evaluations, starts))
            runs[-1] |= {"planner": 1 / recommended(shapes).samples_per_s}
            runs[-1]["seconds"] += seeds_s
            assert runs[-1]["GABRA"] <= min(map(space.cost, starts))
        best = min(run[name] for run in runs for name in worst)
        gaps = {name: [100 * (run[name] / best - 1) for run in runs] for name in worst}
        worst |= {name: max(worst[name], *gaps[name]) for name in worst}
        record({f"{problem}: {name}, worst": max(gap) for name, gap in gaps.items()}, "%")
        record({f"{problem}: GABRA": max(run["seconds"] for run in runs)}, "CPU s")
        text = "; ".join(f"{n} +{np.median(g):.2f}, +{max(g):.2f} %" for n, g in gaps.items())
        print(f"{problem}: {text}; GABRA {runs[0]['seconds']:.1f} s", flush=True)
    print("worst of all: " + "; ".join(f"{name} +{gap:.2f} %" for name, gap in worst.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument("--evaluations", type=int)
    parser.add_argument("--small", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--problems", type=int, nargs="*", default=range(len(PROBLEMS)))
    arguments = parser.parse_args()
    if arguments.joint:
        joint(arguments.evaluations or 2_000, arguments.seeds, arguments.problems)
        return
    console = Console(width=140)
    table = Table("family", "against", "GABRA's step, median", "95 % interval", "shorter, longer",
                  "CPU s")  # fmt: skip
    verdicts, small = [], []
    with Pool(arguments.processes) as pool:
        for name in FAMILIES:
            options = {"name": name, "evaluations": arguments.evaluations or 5_000}
            found = pool.map(partial(searches, **options), range(arguments.instances), 1)
            verdicts.append(compare(name, found, table))
            close = pool.map(partial(small_problem, **options), range(arguments.small), 1)
            small += (counted := [c for c in close if c is not None])
            median, low, high = verdicts[-1]
            console.print(
                f"{name}: {median:+.2f} % ({low:+.2f} to {high:+.2f} %) against the best peer; "
                f"{sum(counted)} of {len(counted)} small problems within 1 %"
            )
    console.print(table)
    shorter = sum(median <= -1 and high < 0 for median, _, high in verdicts)
    longer = sum(median >= 1 for median, _, _ in verdicts)
    earns = shorter >= 3 and not longer and sum(small) >= 0.95 * len(small)
    console.print(
        f"{sum(small)} of {len(small)} small problems within 1 % of the best placement; at least "
        f"1 % shorter than the best peer in {shorter} of {len(verdicts)} families, 1 % longer in "
        f"{longer}: the genetic part {'earns' if earns else 'does not earn'} its keep"
    )


if __name__ == "__main__":
    main()
