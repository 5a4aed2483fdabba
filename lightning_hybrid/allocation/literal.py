"""GABRA as it is printed (Akintoye et al. 2022, Algorithms 1-3), for comparison: `gabra-literal`.

The text alone is not complete. Comments in the code refer to the additions by number.

From the paper: the chromosome is a list of n devices; random initial members within the capacities,
partition after partition (Algorithm 2); selection by roulette wheel on the fitness of Eq. 9;
mid-point crossover with probability 0.8 (Algorithm 3); inversion of a subset of the genes; a child
that is in the population is sent back to selection; else it replaces the worst member; the best one
is kept apart; the end is t_max or the optimal total profit.

Added, because the text is silent or contradicts itself:

1. Eq. 9 leaves j unbound: gene i is the device of partition i, and f = sum_i c_{i, beta_i}.
2. The prose after Eq. 8 exchanges (6) and (7). Here they are as printed: (6) is the capacity of a
   device, (7) that each partition is on exactly one.
3. "Each GPU runs at least one partition" is in the prose only. It is a constraint here.
4. Initial placement: where no device has room for the next partition the member is begun again, and
   after `_RESTARTS` dead ends heavy partitions are placed first, going back from dead ends.
5. Members of the initial population differ from each other as far as that is possible.
6. The two parents are drawn one after the other, with replacement: they may be the same member.
   Without a crossover (probability 0.2) the child begins as a copy of the first.
7. `cp = Y1/2` is read as half the length. Algorithm 3 returns two children and Algorithm 1 takes
   one: it is drawn by lot. The second has its halves exchanged, as printed.
8. A mutation has probability 0.6 and reverses a stretch of random place and length.
9. A child that passes a capacity or leaves a device empty is thrown away, like a duplicate.
10. After `tries` rejected children in a row the algorithm ends (printed: it would loop for ever).
11. Population, t_max and all probabilities but 0.8 are not given. The optimal profit is not known
    while searching: reached means a proven bound, which on equal devices every member attains.
12. With `objective="makespan"`, which the paper has not, fitness is how much shorter a member is
    than the longest one.

Nothing else is repaired: a device that no parent has does not come back, because inversion permutes
genes and crossover recombines them.
"""

import numpy as np

from lightning_hybrid.allocation.gabra import GabraRun, GabraSettings
from lightning_hybrid.allocation.genetic_operators import FreeAssignments, roulette, stretch
from lightning_hybrid.allocation.knapsack import SLACK, Ints, Problem
from lightning_hybrid.errors import AllocationError

_RESTARTS = 50
_GENERATIONS = 600


def literal_gabra(
    problem: Problem, seed: int = 0, settings: GabraSettings | None = None
) -> tuple[Ints, tuple[float, ...]]:
    """Search for an assignment of least cost by the algorithm of the paper.

    Args:
        problem: The problem; it must not be contiguous.
        seed: Seed of all random choices.
        settings: Parameters of the algorithm; None: the defaults with `_GENERATIONS`.

    Returns:
        The best assignment, shape (n,), and the best cost after each generation, the initial
        population first; it never rises.

    Raises:
        AllocationError: the problem is contiguous, or no feasible assignment was found.
    """
    if problem.contiguous:
        raise AllocationError(
            "method='gabra-literal' places partitions freely, as the paper does: use it with "
            "contiguous=False"
        )
    settings = settings or GabraSettings(generations=_GENERATIONS)
    return _Printed(problem, np.random.default_rng(seed), settings).run()


class _Printed(GabraRun):
    """The genetic algorithm as Algorithms 1 to 3 print it, in place of the improved parts."""

    def _populate(self) -> None:
        """Make the initial population (Algorithm 2): random feasible members that all differ."""
        for _ in range(2 * self.settings.population):
            if len(self.members) == self.settings.population:
                return
            member = self._random_member()
            if not self._has(member):  # addition 5
                self.members.append(member)
                self.costs.append(float(self.problem.costs(member[None])[0]))

    def _random_member(self) -> Ints:
        """Make a random feasible assignment: each partition in turn on a random device with room.

        Raises:
            AllocationError: no feasible assignment was found.
        """
        problem = self.problem
        for _ in range(_RESTARTS):
            left = problem.ceilings.copy()
            genes = np.full(problem.n, -1, dtype=np.int64)
            for i in range(problem.n):
                room = np.flatnonzero((left >= problem.weights[:, i : i + 1]).all(axis=0))
                if not room.size:
                    break
                genes[i] = self.rng.choice(room)
                left[:, genes[i]] -= problem.weights[:, i]
            if genes[-1] >= 0 and problem.feasible(genes[None])[0]:
                return genes
        return FreeAssignments(problem).strewn(self.rng)  # addition 4

    def _proven(self, cost: float) -> bool:
        return cost <= self.problem.bound + SLACK * abs(self.problem.bound)  # addition 11

    def _child(self) -> tuple[Ints, float] | None:
        """Make a child and its cost (lines 7 to 13 of Algorithm 1).

        Returns:
            The child and its cost; None: `tries` children in a row were duplicates or infeasible.
        """
        settings = self.settings
        rng = self.rng
        costs = np.asarray(self.costs)
        # addition 10: there are `tries` of them
        profits = self.problem.objective == "profit"
        fitness = -costs if profits else costs.max() - costs  # additions 1, 12
        for _ in range(settings.tries):
            child, other = (self.members[roulette(fitness, rng)] for _ in range(2))
            if rng.random() < settings.crossover:
                child = printed_children(child, other)[int(rng.integers(2))]
            if rng.random() < settings.mutation:
                child = child.copy()
                piece = stretch(len(child), rng)
                child[piece] = child[piece][::-1]
            if self._has(child):
                continue
            cost = float(self.problem.costs(child[None])[0])
            if np.isfinite(cost):  # addition 9
                return child, cost
        return None

    def _has(self, genes: Ints) -> bool:
        return any(np.array_equal(genes, member) for member in self.members)


def printed_children(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Make the two children of Algorithm 3 as it is printed; its cut `cp = Y1/2` is the middle.

    In the second child the halves change places, so that each gene belongs to another partition.

    Returns:
        The first half of `left` and the second of `right`; then the second half of `left` and the
        first of `right`.
    """
    middle = len(left) // 2
    first = np.concatenate([left[:middle], right[middle:]])
    return first, np.concatenate([left[middle:], right[:middle]])
