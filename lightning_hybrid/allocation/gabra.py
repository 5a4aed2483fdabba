"""GABRA, the genetic algorithm of Akintoye et al. 2022 (Algorithms 1-3), with improvements.

`literal` has the algorithm as it is printed. The changes to it are:

* in both children of a crossover every gene stays at its place;
* besides inversion, a mutation changes single genes: inversion and crossover alone never bring back
  a device that all members have lost;
* a child that was *ever* evaluated counts as a duplicate, and after `tries` children in a row that
  were duplicates or infeasible, a new random member takes their place;
* the fitness of a member is how much better it is than the worst one;
* each new member is improved by local search.

It is steady-state, like the paper's: in each generation one child replaces the worst member, so the
best value never gets worse. It stops after `generations`, or when the best value reaches a proven
bound (for `profit` on equal devices at once, since all assignments are equal); for large problems
when the best value is within `tolerance` of the bound. It calls no exact solver.

Here is the course of the search. Its operators (roulette wheel, crossover, inversion and the other
mutation, local search) are in `genetic_operators`.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hybrid.allocation.genetic_operators import FreeAssignments, roulette
from lightning_hybrid.allocation.knapsack import SLACK, Floats, Ints, Problem

_SMALL = 100_000
"""Largest number of possible assignments for which the search stops early only at the bound itself,
and not within `tolerance` of it."""

_FULL_WORK = 16_000
"""Largest product of partitions and devices for which the search has its full population and
generations."""


@dataclass(frozen=True, kw_only=True)
class GabraSettings:
    """Parameters of the genetic algorithm; those that the paper gives are marked.

    Attributes:
        population: number of members.
        generations: t_max, the number of generations.
        crossover: probability of a crossover (paper).
        mutation: probability of each mutation.
        tries: number of rejected children in a row after which random members are tried in their
            place (in `gabra-literal`: the search ends).
        tolerance: relative distance from the proven bound at which a large problem counts as
            solved.
        refine: whether new members are improved by local search; `False` is for measuring its
            effect.
    """

    population: int = 40
    generations: int = 150
    crossover: float = 0.8
    mutation: float = 0.6
    tries: int = 60
    tolerance: float = 1e-3
    refine: bool = True


def gabra(
    problem: Problem, seed: int = 0, settings: GabraSettings | None = None
) -> tuple[Ints, tuple[float, ...]]:
    """Search for an assignment of least cost by the genetic algorithm with improvements.

    Args:
        problem: The partitions and devices.
        seed: Seed of all random choices.
        settings: Parameters of the algorithm; None: the defaults, reduced for large problems.

    Returns:
        The best assignment, shape (n,), and the best cost after each generation, the initial
        population first; it never rises.

    Raises:
        AllocationError: no feasible assignment was found.
    """
    settings = settings or _affordable(problem)
    return GabraRun(problem, np.random.default_rng(seed), settings).run()


def _affordable(problem: Problem) -> GabraSettings:
    """Make default parameters, with fewer members and generations for large problems."""
    share = _FULL_WORK / (problem.n * problem.m)
    usual = GabraSettings()
    return GabraSettings(
        population=min(usual.population, max(8, round(usual.population * share))),
        generations=min(usual.generations, max(8, round(usual.generations * share))),
    )


class GabraRun:
    """One run of the genetic algorithm (Algorithm 1): its population, and all assignments seen.

    It is run once, by `run`, which returns what `gabra` returns.

    Args:
        problem: The partitions and devices.
        rng: Random numbers.
        settings: Parameters of the algorithm.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator, settings: GabraSettings) -> None:
        self.problem = problem
        self.rng = rng
        self.settings = settings
        self.genes = FreeAssignments(problem)
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
            if child is None:  # no new feasible child was found
                break
            worst = int(np.argmax(self.costs))
            self.members[worst], self.costs[worst] = child
            if child[1] < history[-1]:
                best = child[0]
            history.append(min(history[-1], child[1]))
        return best, tuple(history)

    def _populate(self) -> None:
        """Make the initial population (Algorithm 2): random feasible members that all differ.

        It is smaller than wanted if too few are found, or if a member reaches the proven bound.
        """
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
        bound, small = self.problem.bound, self.problem.m**self.problem.n <= _SMALL
        tolerance = SLACK if small else self.settings.tolerance
        return cost <= bound + tolerance * abs(bound)

    def _child(self) -> tuple[Ints, float] | None:
        """Make a new member: a child, or after `tries` failures in a row a random one.

        An attempt fails if it was evaluated before or is infeasible.

        Returns:
            The member and its cost; None: `tries` random attempts have failed too.
        """
        for _ in range(self.settings.tries):
            child = self._admit(self._breed())
            if child is not None:
                return child
        attempts = (self._admit(self.genes.random(self.rng)) for _ in range(self.settings.tries))
        return next((child for child in attempts if child is not None), None)

    def _breed(self) -> Ints:
        settings, rng = self.settings, self.rng
        genes, other = (self.members[roulette(self._fitness(), rng)] for _ in range(2))
        if rng.random() < settings.crossover:
            # one of the two children, at random
            parents = ((genes, other), (other, genes))[int(rng.integers(2))]
            genes = self.genes.crossover(*parents)
        if rng.random() < settings.mutation:
            genes = self.genes.invert(genes, rng)
        if rng.random() < settings.mutation:
            genes = self.genes.perturb(genes, rng)
        return genes

    def _fitness(self) -> Floats:
        """For each member how much better it is than the worst one, in units of cost.

        The worst keeps a tenth of the spread, so that it may still be drawn. The values themselves
        (Eq. 9) differ by a few per cent among good members, so that all would be drawn with nearly
        the same probability.
        """
        costs: Floats = np.asarray(self.costs)
        spread = float(np.ptp(costs)) or 1.0
        return np.asarray(costs.max() - costs + 0.1 * spread)

    def _admit(self, genes: Ints) -> tuple[Ints, float] | None:
        """Evaluate an assignment and improve it by local search.

        Returns:
            The improved assignment and its cost; None: it is infeasible, or was evaluated before.
        """
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
        cost = float(self.problem.costs(genes[None])[0])
        return (genes, cost) if np.isfinite(cost) else None

    def _new(self, genes: Ints) -> bool:
        key = genes.tobytes()
        new = key not in self.seen
        self.seen.add(key)
        return new
