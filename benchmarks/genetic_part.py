"""Does the genetic part of GABRA earn its keep? Five families of problems, against its peers.

Every search may simulate the same number of steps and has the same moves:

* GABRA as it is (`allocation.evolution`), and the same without crossover;
* random restarts: descents from random placements, one after the other;
* annealing: one walk, from 3 % of the step to 0.05 %.

Families: free placements on equal devices; on unequal ones with memory limits; on two hosts with
slow links between them; replicas x stages x stages per device x micro-batches with the cuts, on 8
to 16 devices; two networks that share devices and their memory. For small problems of the first
three all placements are gone through.

It earns its keep if its steps are at least 1 % shorter (median) than those of the best peer in
three families, the interval excluding 0, in no family 1 % longer, and if 95 % of the small problems
come within 1 % of the best placement.

    python benchmarks/genetic_part.py [--instances 50] [--evaluations 5000] [--small 20]
"""

import argparse
from collections.abc import Callable
from itertools import product
from math import exp, inf, isfinite
from time import process_time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_hybrid.allocation.evolution import Breeding, descend, evolve, run_counted
from lightning_hybrid.planning.free_placements import FreePlacements, runs
from lightning_hybrid.planning.step_problem import Links, StepProblem

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
    links = Links.equal(m, 1.0, 0.02)
    return FreePlacements(
        StepProblem(**chain(rng, n), speeds=[1.0] * m, links=links, microbatches=4)
    )


def unequal_with_memory(rng: Rng, n: int = 22, m: int = 3) -> FreePlacements:
    sizes, limits = rng.uniform(0.1, 1.0, n), rng.uniform(0.7, 1.3, m)
    limits *= 1.25 * sizes.sum() / limits.sum()
    problem = StepProblem(
        **chain(rng, n), speeds=rng.uniform(0.4, 1.2, m).tolist(), links=Links.equal(m, 1.0, 0.02),
        microbatches=4, memory=sizes.tolist(), memory_limits=limits.tolist(),
    )  # fmt: skip
    return FreePlacements(problem)


def two_hosts(rng: Rng, n: int = 22, m: int = 4) -> FreePlacements:
    far = [[i // 2 != j // 2 for j in range(m)] for i in range(m)]
    links = Links(
        seconds_per_byte=[[3.0 if f else 0.3 for f in row] for row in far],
        latency_s=[[0.1 if f else 0.01 for f in row] for row in far],
    )
    return FreePlacements(
        StepProblem(**chain(rng, n), speeds=[1.0] * m, links=links, microbatches=4)
    )


class Shapes:
    """Replicas x devices per replica x stages per device x micro-batches, and the cuts.

    Genes are (replicas, stages per device, micro-batches, ends). A batch of 16 samples is shared by
    the replicas; a micro-batch takes a constant and a time per sample.
    """

    def __init__(self, rng: Rng) -> None:
        self.n, self.devices = 34, int(rng.choice([8, 12, 16]))
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
            self._problems[key] = StepProblem(
                forward_s=[0.1 + samples * f for f in self.per_sample["forward_s"]],
                backward_s=[0.2 + samples * b for b in self.per_sample["backward_s"]],
                cut_bytes=[samples * c for c in self.per_sample["cut_bytes"]],
                step_s=self.per_sample["step_s"],
                speeds=[1.0] * size,
                links=Links.equal(size, 1.0, 0.02),
                microbatches=microbatches,
                reduce_s=(ring * self.gradients).tolist(),
                memory=[held] * self.n,
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

    def __init__(self, rng: Rng) -> None:
        m = 3
        shared = {"speeds": [1.0, 0.8, 0.6], "links": Links.equal(m, 1.0, 0.02), "microbatches": 4}
        self.parts = [FreePlacements(StepProblem(**chain(rng, n), **shared)) for n in (14, 10)]
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


def annealing(space: Any, cost: Callable[[Any], float], rng: Rng, evaluations: int) -> None:
    genes = space.random(rng)
    value, asked = cost(genes), 1
    while True:
        near = space.neighbour(genes, rng)
        if near == genes:
            continue
        changed, asked = cost(near), asked + 1
        warmth = 0.03 * (0.0005 / 0.03) ** min(1.0, asked / evaluations)
        better = changed <= value or not isfinite(value)
        if better or rng.random() < exp(-(changed / value - 1) / warmth):
            genes, value = near, changed


def restarts(space: Any, cost: Callable[[Any], float], rng: Rng) -> None:
    while True:
        descend(space, space.random(rng), cost, rng, RESTART_PATIENCE)


def searches(space: Any, seed: int, evaluations: int) -> dict[str, float]:
    """The least step that each search finds."""

    def peer(search: Callable[..., None], *more: Any) -> float:
        rng = np.random.default_rng(seed)
        found = run_counted(space, lambda cost: search(space, cost, rng, *more), evaluations)
        return found[1][-1]

    return {
        "GABRA": evolve(space, seed, Breeding(evaluations=evaluations))[1][-1],
        "no crossover": evolve(space, seed, Breeding(evaluations=evaluations, crossover=0))[1][-1],
        "restarts": peer(restarts),
        "annealing": peer(annealing, evaluations),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, 95 %, by bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def compare(instances: int, evaluations: int) -> tuple[Table, list[tuple[float, float, float]]]:
    table = Table("family", "against", "GABRA's step, median", "95 % interval", "shorter, longer",
                  "CPU s")  # fmt: skip
    verdicts = []
    for name, make in FAMILIES.items():
        found, start = [], process_time()
        for seed in range(instances):
            found.append(searches(make(np.random.default_rng(seed)), seed, evaluations))
        seconds = (process_time() - start) / instances / 4
        best_peer = min(
            ("no crossover", "restarts", "annealing"),
            key=lambda peer: float(np.median([f[peer] / f["GABRA"] for f in found])),
        )
        for peer in ("no crossover", "restarts", "annealing"):
            change = [100 * (f["GABRA"] / f[peer] - 1) for f in found]
            low, high = interval(change)
            median = float(np.median(change))
            if peer == best_peer:
                verdicts.append((median, low, high))
            counts = sum(c < -0.1 for c in change), sum(c > 0.1 for c in change)
            table.add_row(
                name, peer + " (best peer)" * (peer == best_peer), f"{median:+.2f} %",
                f"{low:+.2f} to {high:+.2f} %", f"{counts[0]}, {counts[1]} of {instances}",
                f"{seconds:.2f}",
            )  # fmt: skip
    return table, verdicts


def small_problems(instances: int, evaluations: int) -> tuple[int, int]:
    """How many small problems GABRA solves within 1 % of the best of all placements."""
    close = 0
    makers = (free_equal, unequal_with_memory, two_hosts)
    for make, seed in product(makers, range(instances)):
        rng = np.random.default_rng(1000 + seed)
        n, m = (10, 2) if make is not two_hosts else (7, 3)
        space = make(rng, n, m)
        labels = (x for x in product(range(m), repeat=n) if x[-1] == 0 and len(set(x)) == m)
        best = min(space.problem.step_time_s(*runs(x)) for x in labels)
        if best == inf:
            close += 1  # nothing to find
            continue
        found = evolve(space, seed, Breeding(evaluations=evaluations))[1][-1]
        close += found <= 1.01 * best
    return close, instances * len(makers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument("--evaluations", type=int, default=5_000)
    parser.add_argument("--small", type=int, default=20)
    arguments = parser.parse_args()
    console = Console(width=140)
    close, count = small_problems(arguments.small, arguments.evaluations)
    console.print(f"{close} of {count} small problems within 1 % of the best of all placements")
    table, verdicts = compare(arguments.instances, arguments.evaluations)
    console.print(table)
    shorter = sum(median <= -1 and high < 0 for median, _, high in verdicts)
    longer = sum(median >= 1 for median, _, _ in verdicts)
    earns = shorter >= 3 and not longer and close >= 0.95 * count
    console.print(
        f"at least 1 % shorter than the best peer in {shorter} of {len(verdicts)} families, 1 % "
        f"longer in {longer}: the genetic part {'earns' if earns else 'does not earn'} its keep"
    )


if __name__ == "__main__":
    main()
