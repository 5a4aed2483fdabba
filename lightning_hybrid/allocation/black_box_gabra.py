"""GABRA for any cost: a genetic algorithm that knows of a placement only what it costs.

`gabra` knows the makespan and moves partitions by it. Here the cost is a black box that is called a
given number of times, such as the predicted time of a step. What can be bred is a `SearchSpace`: it
makes random candidates, crosses two, and changes one a little. The rest is Algorithm 1 with local
search: roulette wheel, crossover with probability 0.8, mutation, and a child replaces the worst
member; each new member is improved by random neighbours as long as that helps.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from math import inf
from typing import Protocol, TypeVar

import numpy as np

from lightning_hybrid.allocation.genetic_operators import roulette
from lightning_hybrid.errors import AllocationError

Genes = TypeVar("Genes", bound=Hashable)


class SearchSpace(Protocol[Genes]):
    """What `evolve` searches: candidates (genes), their cost, and moves between them.

    Genes must be hashable, and are never changed in place.
    """

    def random(self, rng: np.random.Generator) -> Genes:
        """Make a random candidate; feasible if possible."""

    def cross(self, left: Genes, right: Genes, rng: np.random.Generator) -> Genes:
        """Make a child that combines both parents."""

    def neighbour(self, genes: Genes, rng: np.random.Generator) -> Genes:
        """Make a copy of a candidate with a small random change."""

    def cost(self, genes: Genes) -> float:
        """The cost of a candidate, which is minimised; infinite: it is infeasible."""


@dataclass(frozen=True, kw_only=True)
class Breeding:
    """Settings of the genetic search.

    Attributes:
        evaluations: how many candidates may be evaluated (`SearchSpace.cost`).
        population: number of members.
        crossover: probability of a crossover; 0: children are changed copies of one parent.
        patience: number of neighbours in a row that are not better, after which the local search of
            a member ends.
    """

    evaluations: int = 5_000
    population: int = 6
    crossover: float = 0.8
    patience: int = 150


_REPEATS = 4
"""A search also ends when it has asked for known costs this many times as often as it may evaluate:
then it has seen nearly all candidates."""


class _Spent(Exception):
    """Raised to end a search that has used up its evaluations."""


def evolve(
    space: SearchSpace[Genes],
    seed: int = 0,
    breeding: Breeding | None = None,
    starts: Sequence[Genes] = (),
) -> tuple[Genes, tuple[float, ...]]:
    """Search for genes of least cost.

    Args:
        space: the candidates, their cost and the moves between them.
        seed: seed of the random numbers.
        breeding: settings of the search; None: the defaults.
        starts: members to begin with, of which the population takes as many as it has room for;
            random members are added if there are fewer. The result is no worse than the first.

    Returns:
        The best genes; and the history: after each evaluation the least cost so far.

    Raises:
        AllocationError: no candidate that was seen was feasible.
    """
    breeding = breeding or Breeding()

    def search(cost: Callable[[Genes], float]) -> None:
        _breed(space, cost, np.random.default_rng(seed), breeding, starts)

    return run_counted(space, search, breeding.evaluations)


def run_counted(
    space: SearchSpace[Genes], search: Callable[[Callable[[Genes], float]], None], evaluations: int
) -> tuple[Genes, tuple[float, ...]]:
    """Run a search that asks for costs, stop it after some evaluations, and return the best it saw.

    Args:
        space: the candidates and their cost.
        search: function that searches. It is given a function from genes to their cost, and must
            take all costs from that one. Costs are remembered: a known cost is no evaluation.
        evaluations: number of candidates that may be evaluated.

    Returns:
        The best genes; and the history: after each evaluation the least cost so far.

    Raises:
        AllocationError: no candidate that was seen was feasible.
    """
    best: Genes | None = None
    history: list[float] = []
    known: dict[Genes, float] = {}
    repeated = 0

    def cost(genes: Genes) -> float:
        nonlocal best, repeated
        if genes in known:
            repeated += 1
            if repeated == _REPEATS * evaluations:
                raise _Spent  # all there is has been seen, or nearly
            return known[genes]
        if len(history) == evaluations:
            raise _Spent  # ends the search, which need not count by itself
        value = known[genes] = space.cost(genes)
        if not history or value < history[-1]:
            best = genes
        history.append(min(value, history[-1] if history else inf))
        return value

    with suppress(_Spent):
        search(cost)
    if best is None or history[-1] == inf:
        raise AllocationError(
            f"none of {len(history)} placements keeps every device within its limits: use "
            "more or larger devices, or smaller partitions"
        )
    return best, tuple(history)


def descend(
    space: SearchSpace[Genes],
    genes: Genes,
    cost: Callable[[Genes], float],
    rng: np.random.Generator,
    patience: int,
) -> tuple[Genes, float]:
    """Improve a candidate by random neighbours, until `patience` in a row were not better.

    Neighbours of equal cost are taken too.

    Args:
        space: makes the neighbours.
        genes: the candidate to begin with.
        cost: function from genes to their cost, from `run_counted`, which counts the evaluations.
        rng: random numbers.
        patience: number of neighbours in a row that are not better, after which the search ends.

    Returns:
        The improved candidate and its cost.
    """
    value, vain = cost(genes), 0
    while vain < patience:
        near = space.neighbour(genes, rng)
        vain += 1
        if near == genes:
            continue
        changed = cost(near)
        if changed < value:
            vain = 0
        if changed <= value:  # along a plateau
            genes, value = near, changed
    return genes, value


def _breed(
    space: SearchSpace[Genes],
    cost: Callable[[Genes], float],
    rng: np.random.Generator,
    breeding: Breeding,
    starts: Sequence[Genes],
) -> None:
    firsts = [*starts[: breeding.population], *repeat(None, breeding.population - len(starts))]
    # the first members are improved less: calls are better spent on their children
    members = [
        descend(
            space,
            space.random(rng) if genes is None else genes,
            cost,
            rng,
            breeding.patience // 3,
        )
        for genes in firsts
    ]
    stale = False  # whether the last child was a member already: then a random one takes its place
    while True:
        values = np.array([value for _, value in members])
        finite = np.where(np.isfinite(values), values, np.nan)
        worst_value = float(np.nanmax(finite)) if np.isfinite(values).any() else 1.0
        spread = worst_value - float(values.min()) if np.isfinite(values).any() else 1.0
        fitness = np.where(np.isfinite(values), worst_value - values, 0.0) + 0.1 * (spread or 1.0)
        child, other = members[roulette(fitness, rng)][0], members[roulette(fitness, rng)][0]
        if rng.random() < breeding.crossover:
            child = space.cross(child, other, rng)
        for _ in range(1 + int(rng.integers(3))):
            child = space.neighbour(child, rng)
        bred = descend(space, space.random(rng) if stale else child, cost, rng, breeding.patience)
        worst = int(values.argmax())
        stale = bred[0] in [genes for genes, _ in members]
        if bred[1] <= values[worst] and not stale:
            members[worst] = bred
