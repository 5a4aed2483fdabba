"""The chromosomes of GABRA, free assignments, and the operators on them.

Gene i is the device of partition i, as in the paper. Two operators are not the paper's: a mutation
that reaches what inversion cannot (devices absent from the population), and `refine`, a local
search. No operator uses an exact solver.
"""

from dataclasses import dataclass

import numpy as np

from lightning_hybrid.allocation.knapsack import SLACK, Floats, Ints, Problem
from lightning_hybrid.errors import AllocationError

_LOOKED_AT, _CELLS = 512, 30_000
"""Number of changes of which the local search takes the best; and most genes of all these changed
chromosomes together, which limits the number for large problems."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Parameters of the genetic algorithm; those that the paper gives are marked.

    Attributes:
        population: number of members.
        generations: t_max, the number of generations.
        crossover: probability of a crossover (paper).
        mutation: probability of each mutation.
        tries: number of rejected children in a row after which a generation is given up.
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


def roulette(fitness: Floats, rng: np.random.Generator) -> int:
    """Draw the index of a member, with a probability in proportion to its fitness (0 or more)."""
    spin = rng.random() * fitness.sum()
    return min(int(np.searchsorted(np.cumsum(fitness), spin)), len(fitness) - 1)


def stretch(length: int, rng: np.random.Generator) -> slice:
    """A random slice, not empty, of a sequence of this length."""
    first, last = np.sort(rng.choice(length + 1, 2, replace=False))
    return slice(int(first), int(last))


class Labels:
    """Free assignments: gene i is the device of partition i, shape (n,)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._cuts_cost = problem.objective == "makespan" and bool(problem.cut_costs.any())

    def random(self, rng: np.random.Generator) -> Ints:
        """A random member; if cuts have costs, every second one is a balanced chain.

        Independent random devices give nearly a cut after each partition, which single moves do not
        repair.
        """
        if self._cuts_cost and rng.random() < 0.5:
            genes = self._chain(rng)
            if self.problem.feasible(genes[None])[0]:
                return genes
        return self.strewn(rng)

    def _chain(self, rng: np.random.Generator) -> Ints:
        """Runs on the devices in a random order, each filled up to the least goal that suffices."""
        problem = self.problem
        n = self.problem.n
        m = self.problem.m
        order = rng.permutation(m)
        if problem.last_device is not None:
            order = np.append(order[order != problem.last_device], problem.last_device)
        sums = np.concatenate([[0.0], np.cumsum(problem.loads)])
        edge = np.concatenate([[0.0], problem.cut_costs, [0.0]])
        # with the last of the goals the first device can take all that the others need not have
        most = sums[-1] / problem.capacities.min() + 2 * edge.max()
        for goal in problem.bound + (most - problem.bound) * np.linspace(0.0, 1.0, 200) ** 3:
            ends = [0]
            for place, device in enumerate(order, 1):
                stops = np.arange(ends[-1] + 1, n - m + place + 1)
                times = (sums[stops] - sums[ends[-1]]) / problem.capacities[device]
                fitting = stops[times + edge[ends[-1]] + edge[stops] <= goal]
                if not fitting.size:
                    break
                ends.append(int(fitting[-1]))
            if ends[-1] == n:
                break
        return np.repeat(order, np.diff(ends))

    def strewn(self, rng: np.random.Generator) -> Ints:
        """Place each partition on a random device with room, by depth-first search.

        For small problems the search decides whether there is a feasible assignment; for larger
        ones the number of steps is limited.

        Raises:
            AllocationError: no assignment was found.
        """
        problem = self.problem
        # heavy partitions first, while there is room; in a somewhat random order, since all members
        # would begin with the same partitions otherwise
        heavy = problem.weights.sum(axis=0) * rng.uniform(0.5, 1.0, problem.n)
        order = np.argsort(-heavy, kind="stable")
        genes = np.full(problem.n, -1, dtype=np.int64)
        choices: list[list[int]] = []
        for _ in range(20_000 + 10 * problem.n):
            if len(choices) == problem.n:
                return genes
            choices.append(self._places(genes, int(order[len(choices)]), rng))
            while choices and not choices[-1]:
                choices.pop()
                if not choices:
                    raise AllocationError(
                        "no assignment keeps every device within its limits: "
                        "use more or larger devices, or smaller partitions"
                    )
                genes[order[len(choices) - 1]] = -1
            genes[order[len(choices) - 1]] = choices[-1].pop()
        raise AllocationError(
            f"found no assignment of {problem.n} partitions to {problem.m} devices within their "
            "limits: use more or larger devices, or smaller partitions"
        )

    def _places(self, genes: Ints, partition: int, rng: np.random.Generator) -> list[int]:
        """Devices that can take this partition, shuffled; the caller tries them from the end."""
        problem, placed = self.problem, genes >= 0
        counts = np.bincount(genes[placed], minlength=problem.m)
        room = np.ones(problem.m, dtype=bool)
        for weights, ceilings in zip(problem.weights, problem.ceilings):
            used = np.bincount(genes[placed], weights[placed], minlength=problem.m)
            room &= used + weights[partition] <= ceilings
        if problem.n - placed.sum() == (counts == 0).sum():
            room &= counts == 0  # the remaining partitions are needed for empty devices
        if partition == problem.n - 1 and problem.last_device is not None:
            room &= np.arange(problem.m) == problem.last_device
        return [int(j) for j in rng.permutation(np.flatnonzero(room))]

    def crossover(self, left: Ints, right: Ints) -> Ints:
        """A child with the first half of one parent and the second of the other (Algorithm 3)."""
        middle = len(left) // 2
        return np.concatenate([left[:middle], right[middle:]])

    def invert(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Reverse a random stretch (the paper's mutation)."""
        genes, piece = genes.copy(), stretch(len(genes), rng)
        genes[piece] = genes[piece][::-1]
        return genes

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Give one partition another device; if cuts have costs, also several neighbouring ones."""
        genes, place = genes.copy(), int(rng.integers(len(genes)))
        piece = slice(place, place + 1)
        if self._cuts_cost and rng.random() < 0.5:
            piece = stretch(len(genes), rng)
        genes[piece] = rng.integers(self.problem.m)
        return genes

    def refine(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Move a partition or exchange two, as long as that is an improvement.

        For the makespan only partitions of the slowest device are moved or exchanged. Of changes
        with equal makespan the one with the most equal times is taken.
        """
        # (from an infeasible assignment nearly all changes have infinite costs)
        cost = float(self.problem.costs(genes[None])[0])
        if not np.isfinite(cost):
            return genes
        now = (cost, np.inf)
        while True:
            changed = self._changed(genes, rng)
            if not len(changed):
                return genes
            costs, spreads = self._judged(changed)
            best = int(np.lexsort((spreads, costs))[0])
            after = float(costs[best]), float(spreads[best])
            if not _less(after, now):
                return genes
            genes, now = changed[best], after

    def _judged(self, assignments: Ints) -> tuple[Floats, Floats]:
        """Cost of each assignment, infinite if infeasible, and how unequal its times are."""
        if self.problem.objective == "profit":
            costs = self.problem.costs(assignments)
            return costs, np.zeros(len(costs))
        # if two devices are equally slow, no single change reduces the makespan: the sum of squares
        # tells which change is progress
        times = self.problem.times(assignments)
        costs = np.where(self.problem.feasible(assignments), times.max(axis=1), np.inf)
        return costs, np.square(times).sum(axis=1)

    def _changed(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """The assignments after each single change that is tried, shape (changes, n).

        A change exchanges a partition with one of another device, or moves it there.
        """
        n, m = self.problem.n, self.problem.m
        here = np.arange(n)
        if self.problem.objective == "makespan":
            here = np.flatnonzero(genes == self.problem.times(genes[None])[0].argmax())
        # `second` is a partition, or n + j for a move to device j
        first, second = np.repeat(here, n + m), np.tile(np.arange(n + m), len(here))
        most = min(_LOOKED_AT, max(1, _CELLS // n))
        if len(first) > most:
            some = rng.choice(len(first), most, replace=False)
            first, second = first[some], second[some]
        places = np.concatenate([genes, np.arange(m)])
        allowed = places[first] != places[second]
        if self.problem.last_device is not None:
            allowed &= (first != n - 1) & (second != n - 1)
        first, second = first[allowed], second[allowed]
        # all assignments in one array, since many small arrays would be slow
        changed = np.repeat(genes[None], len(first), axis=0)
        rows, back = np.arange(len(first)), second < n
        changed[rows, first] = places[second]
        changed[rows[back], second[back]] = genes[first[back]]
        return changed

    def canonical(self, genes: Ints) -> Ints:
        """Renumber equal devices, so that assignments that differ only in these are one."""
        problem = self.problem
        if len(set(problem.classes)) == problem.m:
            return genes
        # for each class of equal devices their numbers, given out in the order of appearance
        free = [iter(np.flatnonzero(np.equal(problem.classes, k))) for k in range(problem.m)]
        name: dict[int, int] = {}
        for device in genes.tolist():
            if device not in name:
                name[device] = int(next(free[problem.classes[device]]))
        return np.array([name[device] for device in genes.tolist()])


def _less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether `one` is less than `other`, in lexicographic order, by more than rounding errors.

    With rounding errors alone the search could go in a circle.
    """
    slack = [SLACK * abs(number) for number in other]
    if one[0] < other[0] - slack[0]:
        return True
    return bool(one[0] <= other[0] and one[1] < other[1] - slack[1])
