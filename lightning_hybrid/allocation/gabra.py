"""GABRA, the genetic algorithm of Akintoye et al. 2022 (Algorithms 1-3), read twice.

The *literal* reading is the paper's text with its gaps closed by the least invention:

* chromosome: the device of each partition (Eq. 9 with j = beta_i, the only reading that binds j);
* Algorithm 3 with the cut at half the length (printed: `cp = Y1/2`); its second child is printed as
  the second half of one parent followed by the first half of the other, genes change places;
* of the two children that Algorithm 3 returns, Algorithm 1 takes one: drawn by lot;
* a child that passes a limit or leaves a device empty is thrown away;
* labels that no parent has do not come back: inversion permutes genes, crossover recombines them;
* a child that is in the population sends the algorithm back to selection, but no more than
  `tries` times (printed: for ever).

The *repaired* reading, the default, changes what keeps the literal one from good answers:

* the halves keep their places in both children;
* contiguous problems use chromosomes of runs, on which the operators make sense;
* besides inversion, a mutation changes single genes: inversion and crossover alone never bring back
  a device that all members have lost;
* a child that was *ever* evaluated counts as a duplicate, and when `tries` children in a row were
  duplicates or infeasible, a new random member takes their place;
* each new member is refined by local moves.

Both are steady-state: one child replaces the worst member per generation, so the best value never
gets worse. Both stop after `generations`, or when the best value reaches a proven bound (for
`profit` on equal devices: at once, all assignments being equal); on large problems the repaired one
stops within `tolerance` of it. Neither calls an exact solver.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hybrid.allocation.chromosomes import Genes
from lightning_hybrid.allocation.knapsack import SLACK, Floats, Ints, Problem
from lightning_hybrid.allocation.labels import Labels, printed_children
from lightning_hybrid.allocation.runs import Runs
from lightning_hybrid.errors import AllocationError

_SMALL = 100_000
"""Assignments of a problem that is always searched to the end."""

_FULL_WORK = 16_000
"""Partitions times devices up to which the search has all its members and generations."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of the algorithm; those that the paper gives are marked so."""

    population: int = 40
    """Members."""
    generations: int = 150
    """t_max."""
    crossover: float = 0.8
    """Probability of a crossover (paper)."""
    mutation: float = 0.6
    """Probability of each mutation."""
    tries: int = 60
    """Children in a row that may be rejected before a generation is given up."""
    tolerance: float = 1e-3
    """How far from a proven bound, relative to it, the best value of a large problem may stay."""
    refine: bool = True
    """Whether new members are improved by local moves; without, for measuring what they bring."""
    literal: bool = False
    """The literal reading instead of the repaired one; free assignments only."""


def gabra(
    problem: Problem, seed: int = 0, settings: Settings | None = None
) -> tuple[Ints, tuple[float, ...]]:
    """Search for an assignment of least cost.

    Returns:
        The best assignment, shape (n,), and the best cost after each generation, the initial
        population first; it never rises.

    Raises:
        AllocationError: no feasible assignment was found, or the literal reading was asked to be
            contiguous.
    """
    settings = settings or _affordable(problem)
    if settings.literal and problem.contiguous:
        raise AllocationError("the literal GABRA knows no contiguity: use contiguous=False")
    evolution = _Evolution(problem, np.random.default_rng(seed), settings)
    return evolution.run()


def _affordable(problem: Problem) -> Settings:
    """The default numbers; fewer members and generations where each takes long."""
    share = _FULL_WORK / (problem.n * problem.m)
    usual = Settings()
    return Settings(
        population=min(usual.population, max(8, round(usual.population * share))),
        generations=min(usual.generations, max(8, round(usual.generations * share))),
    )


class _Evolution:
    """One run of Algorithm 1."""

    def __init__(self, problem: Problem, rng: np.random.Generator, settings: Settings) -> None:
        self.problem, self.rng, self.settings = problem, rng, settings
        self.genes: Genes = Runs(problem) if problem.contiguous else Labels(problem)
        self.members: list[Ints] = []
        self.costs: list[float] = []
        self.seen: set[bytes] = set()

    def run(self) -> tuple[Ints, tuple[float, ...]]:
        self._populate()
        best = self.members[int(np.argmin(self.costs))]
        history = [min(self.costs)]
        for _ in range(self.settings.generations):
            if self._proven(history[-1]):
                break
            child = self._child()
            if child is None:  # nothing new within reach
                break
            worst = int(np.argmax(self.costs))
            self.members[worst], self.costs[worst] = child
            if child[1] < history[-1]:
                best = child[0]
            history.append(min(history[-1], child[1]))
        return self.genes.decode(best), tuple(history)

    def _populate(self) -> None:
        """Algorithm 2: random feasible members, no two alike as far as there are enough."""
        for _ in range(2 * self.settings.population):
            if len(self.members) == self.settings.population:
                return
            member = self._admit(self.genes.random(self.rng))
            if member is None:
                continue
            self.members.append(member[0])
            self.costs.append(member[1])
            if self._proven(member[1]):
                return

    def _proven(self, cost: float) -> bool:
        bound, small = self.problem.bound, self.problem.size <= _SMALL
        tolerance = SLACK if small or self.settings.literal else self.settings.tolerance
        return cost <= bound + tolerance * abs(bound)

    def _child(self) -> tuple[Ints, float] | None:
        """A new member with its cost; None if `tries` attempts brought none."""
        for _ in range(self.settings.tries):
            child = self._admit(self._breed())
            if child is not None:
                return child
        if self.settings.literal:
            return None
        attempts = (self._admit(self.genes.random(self.rng)) for _ in range(self.settings.tries))
        return next((child for child in attempts if child is not None), None)

    def _breed(self) -> Ints:
        settings, rng = self.settings, self.rng
        first, second = self._select(), self._select()
        genes = first
        if rng.random() < settings.crossover:
            genes = self._crossed(first, second)
        if rng.random() < settings.mutation:
            genes = self.genes.invert(genes, rng)
        if not settings.literal and rng.random() < settings.mutation:
            genes = self.genes.perturb(genes, rng)
        return genes

    def _crossed(self, first: Ints, second: Ints) -> Ints:
        """One of the two children, by lot."""
        which = int(self.rng.integers(2))
        if self.settings.literal:
            return printed_children(first, second)[which]
        return self.genes.crossover(*((first, second), (second, first))[which])

    def _select(self) -> Ints:
        """Roulette wheel: the chance of a member is in proportion to its fitness."""
        fitness = self._fitness()
        spin = self.rng.random() * fitness.sum()
        return self.members[min(int(np.searchsorted(np.cumsum(fitness), spin)), len(fitness) - 1)]

    def _fitness(self) -> Floats:
        """Eq. 9 as it is (literal), or how much better than the worst member a member is.

        The values of good members differ by a few per cent: as they are they would all have the
        same chance.
        """
        costs: Floats = np.asarray(self.costs)
        if self.settings.literal and self.problem.objective == "profit":
            return -costs
        spread = float(np.ptp(costs)) or 1.0
        return np.asarray(costs.max() - costs + 0.1 * spread)

    def _admit(self, genes: Ints) -> tuple[Ints, float] | None:
        """Refine and evaluate a chromosome; None if it is infeasible or not new."""
        if self.settings.literal:
            new = not any(np.array_equal(genes, member) for member in self.members)
            return self._evaluated(genes) if new else None
        start = self.genes.canonical(genes)
        child = self._evaluated(start) if self._new(start) else None
        if child is None:
            return None
        if not self.settings.refine:
            return child
        refined = self.genes.canonical(self.genes.refine(start, self.rng))
        if np.array_equal(refined, start):
            return child
        return self._evaluated(refined) if self._new(refined) else None

    def _evaluated(self, genes: Ints) -> tuple[Ints, float] | None:
        cost = float(self.problem.costs(self.genes.decode(genes)[None])[0])
        return (genes, cost) if np.isfinite(cost) else None

    def _new(self, genes: Ints) -> bool:
        key = genes.tobytes()
        new = key not in self.seen
        self.seen.add(key)
        return new
