"""The operators of GABRA: roulette wheel, crossover, inversion, another mutation, local search.

They work on chromosomes. A chromosome is an assignment of partitions to devices: gene i is the
device of partition i, as in the paper. Two operators are not the paper's: `perturb`, a mutation
that brings back devices which all members have lost (inversion cannot), and `refine`, a local
search. No operator uses an exact solver. `gabra` and `literal` decide when which of them is used.
"""

import numpy as np

from lightning_hybrid.allocation.knapsack import SLACK, Floats, Ints, Problem
from lightning_hybrid.errors import AllocationError

_LOOKED_AT, _CELLS = 512, 30_000
"""Limits of each step of the local search: number of changes of which it takes the best; and number
of genes of all these changed assignments together, which leaves fewer changes for large
problems."""


def roulette(fitness: Floats, rng: np.random.Generator) -> int:
    """Draw the index of a member, with a probability in proportion to its fitness.

    Args:
        fitness: for each member a number of 0 or more.
        rng: random numbers.
    """
    spin = rng.random() * fitness.sum()
    return min(int(np.searchsorted(np.cumsum(fitness), spin)), len(fitness) - 1)


def stretch(length: int, rng: np.random.Generator) -> slice:
    """Draw a random slice of a sequence; it is never empty.

    Args:
        length: length of the sequence, at least 1.
        rng: random numbers.
    """
    first, last = np.sort(rng.choice(length + 1, 2, replace=False))
    return slice(int(first), int(last))


class FreeAssignments:
    """Operators on free assignments: integer arrays, gene i is the device of partition i.

    Args:
        problem: The partitions and devices, with their limits.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._cuts_cost = problem.objective == "makespan" and bool(problem.cut_costs.any())

    def random(self, rng: np.random.Generator) -> Ints:
        """Make a random feasible assignment; if cuts have costs, often a balanced chain.

        Random devices alone would give nearly a cut after each partition, which moves of single
        partitions do not repair.

        Raises:
            AllocationError: no assignment within the limits was found.
        """
        if self._cuts_cost and rng.random() < 0.5:
            genes = self._chain(rng)
            if self.problem.feasible(genes[None])[0]:
                return genes
        return self.strewn(rng)

    def _chain(self, rng: np.random.Generator) -> Ints:
        """Make a chain: each device, in random order, gets one run of consecutive partitions.

        Each run is filled up to a time goal; the goal is the least of 200 with which all partitions
        have a place. Memory is not considered. The result may be infeasible.
        """
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

        Small problems are searched completely: an error then means that there is no feasible
        assignment. For larger ones the number of steps is limited.

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
        """List the devices that can take a partition within the limits, in random order.

        Args:
            genes: the device of each partition; -1: it is not placed yet.
            partition: number of the partition.
            rng: random numbers.
        """
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
        """Make a child: the first half of `left` and the second half of `right` (Algorithm 3)."""
        middle = len(left) // 2
        return np.concatenate([left[:middle], right[middle:]])

    def invert(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Make a copy with the genes of a random slice reversed (the paper's mutation)."""
        genes, piece = genes.copy(), stretch(len(genes), rng)
        genes[piece] = genes[piece][::-1]
        return genes

    def perturb(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Give one partition a random device (a mutation); the result may be infeasible.

        If cuts have costs, a random slice of partitions gets that device in half of the calls.
        """
        genes, place = genes.copy(), int(rng.integers(len(genes)))
        piece = slice(place, place + 1)
        if self._cuts_cost and rng.random() < 0.5:
            piece = stretch(len(genes), rng)
        genes[piece] = rng.integers(self.problem.m)
        return genes

    def refine(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Improve an assignment by local search: move a partition, or exchange two, while it helps.

        For the makespan only partitions of the slowest device are moved or exchanged. Of changes
        with equal makespan the one after which the devices' times are most equal is taken. An
        infeasible assignment is returned as it is.
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
        """Judge assignments, shape (b, n), by their cost, and then by how unequal the times are.

        Returns:
            (b,) costs, infinite if infeasible; and (b,) sums of the squared times of the devices,
            which are less the more equal the times are (for `profit`: zeros).
        """
        if self.problem.objective == "profit":
            costs = self.problem.costs(assignments)
            return costs, np.zeros(len(costs))
        # if two devices are equally slow, no single change reduces the makespan: the sum of squares
        # tells which change is progress
        times = self.problem.times(assignments)
        costs = np.where(self.problem.feasible(assignments), times.max(axis=1), np.inf)
        return costs, np.square(times).sum(axis=1)

    def _changed(self, genes: Ints, rng: np.random.Generator) -> Ints:
        """Make the assignments after each change that local search tries, shape (changes, n).

        A change exchanges a partition with a partition of another device, or moves it to another
        device. If there are many changes, some are drawn. Infeasible ones are among them.
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
        """Renumber equal devices in the order in which they appear.

        So assignments that differ only in the numbers of equal devices become the same assignment.
        """
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

    If rounding errors counted, the local search could go in a circle.

    Args:
        one: cost of an assignment, and sum of the squared times of its devices.
        other: the same of another assignment.
    """
    slack = [SLACK * abs(number) for number in other]
    if one[0] < other[0] - slack[0]:
        return True
    return bool(one[0] <= other[0] and one[1] < other[1] - slack[1])
